"""Downloads of Hugging Face repositories with huggingface_hub, in its cache layout, resumable and with HF_TOKEN."""

import contextlib
import glob
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from graphcore.checkpoint.sources.cached_file import writable
from graphcore.checkpoint.sources.known_hash import known_sha256
from graphcore.checkpoint.sources.source import HubSource
from graphcore.errors import CheckpointError, CheckpointNotFoundError, quoted
from graphcore.progress import Progress

MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
OTHER_FILES = ["*/*", "consolidated*"]  # subfolders and Mistral's second copy hold the same weights again
USED_NAME = ".last_used"  # empty file in a repository's cache folder; its time is that of graphcore's last use
LONGEST_REASON = 200  # characters of the library's own text in a message

_SHA256 = re.compile("[0-9a-f]{64}")
_SHARD = re.compile(r"(.+-)(\d{5})(-of-(\d{5})\.gguf)")


def fetch_hub(source: HubSource, cache_dir: Path, hashes: Path, report: Progress) -> Path:
    """Return the local snapshot folder of a repository, or the file that the source names; download if needed.

    For a sharded GGUF file all shards are downloaded and the path of the named one is returned. Large files are
    checked once against the Hub's hashes, which are their names in the library's cache.

    Args:
        source: repository, with an optional revision and file.
        cache_dir: cache folder of the library.
        hashes: folder of the known hashes of files (known_hash.py).
        report: callback for progress; see `fetch`.

    Raises:
        CheckpointNotFoundError: the repository, revision or file does not exist or is gated, or the Hub cannot be
            reached and the cache does not have it.
        CheckpointError: the disk is full, the cache cannot be written, or a file's hash differs from the Hub's.
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
    """Check the files that the cache names by their sha256; small files have git's hash as name and are not checked.

    Raises:
        CheckpointError: a hash differs.
    """
    stored = [file.resolve() for file in files]
    large = [file for file in stored if _SHA256.fullmatch(file.name)]
    for index, file in enumerate(large):
        if known_sha256(file, hashes, partial(report, "check", None, index, len(large))) != file.name:
            raise CheckpointError(
                f"{file}: is not what the Hub has (its sha256 differs); delete it, and it is fetched again"
            )


def shards_of(file: str) -> list[str]:
    """Return the names of all shards of a GGUF file, in order; only the file itself if it is not sharded."""
    match = _SHARD.fullmatch(file)
    if match is None:
        return [file]
    prefix, _, suffix, count = match.groups()
    return [f"{prefix}{index:05}{suffix}" for index in range(1, int(count) + 1)]


def _download(source: HubSource, cache_dir: Path, report: Progress) -> Path:
    import huggingface_hub

    report("download", None, 0, 0)  # the library first requests the list of files
    # One call for files and folders: it requests the repository first, so that a missing network is noticed at once.
    files = None if source.file is None else [glob.escape(file) for file in shards_of(source.file)]
    folder = huggingface_hub.snapshot_download(
        source.repo,
        revision=source.revision,
        cache_dir=cache_dir,
        allow_patterns=files or MODEL_FILES,
        ignore_patterns=None if files else OTHER_FILES,
        tqdm_class=reporting_bars(report),
    )
    with contextlib.suppress(OSError):  # a read-only cache is used, too
        (Path(folder).parents[1] / USED_NAME).touch()
    return Path(folder)


@contextlib.contextmanager
def _explained(source: HubSource) -> Iterator[None]:
    """Turn the library's errors into one-line errors that say what to do; the most specific come first."""
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


def reporting_bars(report: Progress) -> type[Any]:
    """Return a tqdm class that draws nothing and calls `report("download", None, bytes done, bytes known so far)`.

    The library makes one bar per file, or one for all files, from several threads. Bars that count files do not
    report, nor does the second byte counter that some versions have for the same download.
    """
    from huggingface_hub.utils.tqdm import tqdm

    lock = threading.Lock()

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.is_reporting = kwargs.get("unit") == "B" and not str(kwargs.get("name")).endswith(".transfer")
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # the library's
            self.nbytes_done = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            """Add `n` to the bytes done, and report them."""
            if self.is_reporting:
                with lock:
                    self.nbytes_done += int(n or 0)
                    report("download", None, self.nbytes_done, int(self.total or 0))

    return ReportingBar
