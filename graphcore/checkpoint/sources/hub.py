"""Hugging Face repositories, through huggingface_hub: its cache layout, its resumed downloads, its HF_TOKEN."""

import contextlib
import glob
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.sources.cached_file import writable
from graphcore.checkpoint.sources.hub_progress import reporting_bars
from graphcore.checkpoint.sources.known_hash import known_sha256
from graphcore.checkpoint.sources.source import HubSource
from graphcore.errors import CheckpointError, CheckpointNotFoundError
from graphcore.progress import Progress

MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
OTHER_FILES = ["*/*", "consolidated*"]  # subfolders and Mistral's second copy hold the same weights again
USED_NAME = ".last_used"  # an empty file beside the library's; its time is when graphcore last asked for the repository
LONGEST_REASON = 200  # characters of the library's own words in a message

_SHA256 = re.compile("[0-9a-f]{64}")
_SHARD = re.compile(r"(.+-)(\d{5})(-of-(\d{5})\.gguf)")


def fetch_hub(source: HubSource, cache_dir: Path, hashes: Path, report: Progress) -> Path:
    """Return the repository's local snapshot folder, or its one named file; what is cached needs no network.

    Of a sharded GGUF every shard is fetched, and the path of the named one returned. Large files are compared with the
    Hub's hashes of them, which the library gives them as names, once.

    Args:
        cache_dir: the library's own cache.
        hashes: where the hashes of files are kept (known_hash.py).

    Raises:
        CheckpointNotFoundError: there is no such repository, revision or file, it is gated, or the Hub is out of
            reach and the cache lacks it.
        CheckpointError: the disk is full, the cache cannot be written, or a file is not what the Hub has.
    """
    with writable(cache_dir), _explained(source):
        cache_dir.mkdir(parents=True, exist_ok=True)
        folder = _download(source, cache_dir, report)
    if source.file is None and not (folder / "config.json").is_file():
        action = f"if it holds GGUF files, name one: hf:{source.repo}/model.gguf"
        raise _failure(source, "has no config.json", action)
    wanted = [] if source.file is None else shards_of(source.file)
    missing = [file for file in wanted if not (folder / file).is_file()]
    if missing:
        raise _failure(source, f"has no file {quoted(missing[0])}", "check the path after the repository")
    _check_hashes([folder / file for file in wanted] or sorted(folder.iterdir()), hashes, report)
    return folder / source.file if source.file else folder


def _check_hashes(files: list[Path], hashes: Path, report: Progress) -> None:
    """Pass if every file that the Hub keeps by its sha256 has it; smaller ones are kept by a hash that git computes.

    Raises:
        CheckpointError: one has not.
    """
    stored = [file.resolve() for file in files]
    large = [file for file in stored if _SHA256.fullmatch(file.name)]
    for index, file in enumerate(large):
        if known_sha256(file, hashes, partial(report, "check", None, index, len(large))) != file.name:
            raise CheckpointError(
                f"{file}: is not what the Hub has (its sha256 differs); delete it, and it is fetched again"
            )


def shards_of(file: str) -> list[str]:
    """Return the names of all shards of a GGUF file, in order; a whole file is its own only shard."""
    match = _SHARD.fullmatch(file)
    if match is None:
        return [file]
    prefix, _, suffix, count = match.groups()
    return [f"{prefix}{index:05}{suffix}" for index in range(1, int(count) + 1)]


def _download(source: HubSource, cache_dir: Path, report: Progress) -> Path:
    import huggingface_hub

    report("download", None, 0, 0)  # the library asks for the list of files first
    # One call for both kinds: it asks for the repository first, so a missing network shows at once, not per file.
    files = None if source.file is None else [glob.escape(file) for file in shards_of(source.file)]
    folder = huggingface_hub.snapshot_download(
        source.repo,
        revision=source.revision,
        cache_dir=cache_dir,
        allow_patterns=files or MODEL_FILES,
        ignore_patterns=None if files else OTHER_FILES,
        tqdm_class=reporting_bars(report),
    )
    with contextlib.suppress(OSError):  # a cache that cannot be written to is used all the same
        (Path(folder).parents[1] / USED_NAME).touch()
    return Path(folder)


@contextlib.contextmanager
def _explained(source: HubSource) -> Iterator[None]:
    """Turn the library's errors into one line that says what to do; its order is from special to general."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        action = f"accept its terms on https://huggingface.co/{source.repo}, then set HF_TOKEN"
        raise _failure(source, "is gated", action) from error
    except errors.RepositoryNotFoundError as error:
        raise _failure(source, "is not there, or is private", "check the name, or set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise _failure(source, f"has no revision '{source.revision}'", "check the name after @") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        action = "check the network (HF_HUB_OFFLINE, HF_ENDPOINT), or give a local path"
        raise _failure(source, "cannot be reached, and the cache does not hold it whole", action) from error
    except (errors.HTTPError, errors.EntryNotFoundError, ValueError, RuntimeError) as error:  # type: ignore[attr-defined]  # of its HTTP library
        raise _failure(source, f"cannot be fetched ({_one_line(error)})", "try again: a download resumes") from error


def _failure(source: HubSource, found: str, action: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"hf:{source.repo} {found}; {action}")


def _one_line(error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]}..."
