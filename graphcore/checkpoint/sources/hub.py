"""Models of Hugging Face repositories, in huggingface_hub's own cache; downloads are the library's.

<HF_HUB_CACHE>/models--org--name/    what any program has downloaded, and where new downloads go
  snapshots/<commit>/config.json  -> blobs/<git's hash>
  snapshots/<commit>/x.gguf       -> blobs/<sha256> (itself a link if repositories share the file)
  refs/main                       the commit

A model whose files are all in the cache is used from there, without the network, and also on a read-only file system.
"""

import contextlib
import errno
import re
import textwrap
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from graphcore.checkpoint.sources.cached_file import writable
from graphcore.checkpoint.sources.known_hash import known_sha256
from graphcore.checkpoint.sources.repository_files import ModelFiles, choose_files, repository_error
from graphcore.checkpoint.sources.source import HubSource
from graphcore.errors import CheckpointError, CheckpointNotFoundError
from graphcore.progress import Progress

REPOSITORY = "models--"  # prefix of huggingface_hub's model folders, in which "--" stands for "/"
MAIN = "main"  # the default revision
LONGEST_REASON = 200  # characters of the library's own text in a message

_SHA256 = re.compile("[0-9a-f]{64}")
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Listing:
    """The commit of a revision, and the paths of all files in it, as the Hub lists them."""

    commit: str
    names: tuple[str, ...]


def hub_cache() -> Path:
    """Return huggingface_hub's cache folder."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def fetch_hub(source: HubSource, hashes: Path, report: Progress) -> Path:
    """Return the local folder or file of a repository's model; download what the cache lacks.

    For a sharded GGUF file all shards are downloaded and the path of the first, or of the named one, is returned. Large
    files are checked once against the Hub's hashes, which are their names in the library's cache.

    Args:
        source: repository, with an optional revision, and the model in it.
        hashes: folder of the known hashes of files (known_hash.py).
        report: callback for progress; see `fetch`.

    Raises:
        CheckpointNotFoundError: the repository, revision or model does not exist or is gated, or the Hub cannot be
            reached and the cache does not have the complete model.
        CheckpointError: the source names several models, the disk is full, the cache cannot be written, or a file's
            hash differs from the Hub's.
    """
    report("download", None, 0, 0)  # the list of files is requested first
    cache = hub_cache()
    with writable(cache, setting="HF_HUB_CACHE"), hub_errors_explained(source):
        folder, files = _find_or_download(source, cache, report)
    missing = [file for file in files.weights if not (folder / file).is_file()]
    if missing:
        raise repository_error(source, f"gave no {missing[0]}", "try again: a download resumes")
    _check_hashes([folder / file for file in (*files.weights, *files.others)], hashes, report)
    return folder / files.opened


def _find_or_download(source: HubSource, cache: Path, report: Progress) -> tuple[Path, ModelFiles]:
    """Return the snapshot folder that holds a model, and the model's files in it."""
    from huggingface_hub import errors

    try:
        listing = request_listing(source)
    except errors.RevisionNotFoundError:
        raise
    except (errors.HTTPError, OSError):  # type: ignore[attr-defined]  # of its HTTP library
        stored = _stored(source, cache)
        if stored is None:
            raise
        return stored
    files = choose_files(source, listing.names)
    folder = _snapshot(cache, source, listing.commit)
    if _holds(folder, (*files.weights, *files.others)):
        return folder, files
    try:
        return _download(source, files, cache, report), files
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        stored = (folder, files) if _holds(folder, files.weights) else _stored(source, cache)
        if stored is None:
            raise
        return stored


def request_listing(source: HubSource) -> Listing:
    """Return the commit and the files of a source's revision, from the Hub."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(source.repo, revision=source.revision or MAIN)
    assert info.sha is not None, "the Hub answers with a commit"
    return Listing(info.sha, tuple(file.rfilename for file in info.siblings or ()))


def stored_model(source: HubSource) -> Path | None:
    """Return the local folder or file of a repository's model if the cache holds all of it; nothing is requested."""
    stored = _stored(source, hub_cache())
    return None if stored is None else stored[0] / stored[1].opened


def _stored(source: HubSource, cache: Path) -> tuple[Path, ModelFiles] | None:
    """Return the snapshot of the revision and the model's files in it if it has all, judged by their names."""
    folder = _snapshot(cache, source, None)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        files = choose_files(source, names)
    except CheckpointNotFoundError:
        return None
    return (folder, files) if _holds(folder, files.weights) else None


def _snapshot(cache: Path, source: HubSource, commit: str | None) -> Path:
    """Return the folder of a commit in a cache, which need not exist; None is the commit that the cache's ref names."""
    entry = cache / f"{REPOSITORY}{source.repo.replace('/', '--')}"
    if commit is None:
        revision = source.revision or MAIN
        ref = entry / "refs" / revision
        commit = ref.read_text("utf-8").strip() if ref.is_file() else revision
    return entry / "snapshots" / commit


def _holds(folder: Path, names: Iterable[str]) -> bool:
    return all((folder / name).is_file() for name in names)


def _download(source: HubSource, files: ModelFiles, cache: Path, report: Progress) -> Path:
    """Download the files of a model that the cache lacks, and return the snapshot folder."""
    import huggingface_hub

    cache.mkdir(parents=True, exist_ok=True)
    folder = huggingface_hub.snapshot_download(
        source.repo,
        revision=source.revision,
        cache_dir=cache,
        allow_patterns=[escape(name) for name in (*files.weights, *files.others)],
        tqdm_class=reporting_bars(report),
    )
    return Path(folder)


def _check_hashes(files: Iterable[Path], hashes: Path, report: Progress) -> None:
    """Check the files that the cache names by their sha256; small files have git's hash as name and are not checked.

    Only a file's first link has that name: it may lead to a store that repositories share, with names of another hash.

    Raises:
        CheckpointError: a hash differs.
    """
    named = [(file, file.readlink().name) for file in files if file.is_symlink()]
    large = [(file, name) for file, name in named if _SHA256.fullmatch(name)]
    for index, (file, name) in enumerate(large):
        if known_sha256(file, hashes, partial(report, "check", None, index, len(large))) != name:
            raise CheckpointError(
                f"{file.resolve()}: is not what the Hub has (its sha256 differs); delete it, and it is fetched again"
            )


@contextlib.contextmanager
def hub_errors_explained(source: HubSource) -> Iterator[None]:
    """Turn the library's errors into one-line errors that say what to do; the most specific come first."""
    from huggingface_hub import errors

    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        action = f"accept its terms on https://huggingface.co/{source.repo}, then set HF_TOKEN"
        raise repository_error(source, "is gated", action) from error
    except errors.RepositoryNotFoundError as error:
        raise repository_error(source, "is not there, or is private", "check the name, or set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise repository_error(source, f"has no revision '{source.revision}'", "check the name after @") from error
    except (errors.HfHubHTTPError, ValueError, RuntimeError) as error:
        said = textwrap.shorten(str(error), LONGEST_REASON, placeholder="...") or type(error).__name__
        raise repository_error(source, f"cannot be fetched ({said})", "try again: a download resumes") from error
    except (errors.EntryNotFoundError, errors.HTTPError, ConnectionError, TimeoutError) as error:  # type: ignore[attr-defined]  # of its HTTP library
        action = "check the network (HF_HUB_OFFLINE, HF_ENDPOINT), or give a local path"
        raise repository_error(source, "cannot be reached, and the cache does not hold it whole", action) from error


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
