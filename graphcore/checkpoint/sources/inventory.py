"""The inventory of the cache folders, from names, sizes and times of files. No weights are read.

<cache_dir>/pypi/<digest>/           one file from packages (cached_file.py)
<cache_dir>/benchmarks/<model>.gguf  a random model that a benchmark has packed
<cache_dir>/<anything else>          files that graphcore makes again if they are missing: kernels, tokenizers, ...
<HF_HUB_CACHE>/models--org--name/    one repository: blobs/, snapshots/, refs/; whoever downloaded it (hub.py)
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from graphcore.checkpoint.sources.cached_file import LOCK_NAME, find_whole, locked_entry, writable
from graphcore.checkpoint.sources.hub import REPOSITORY, hub_cache

UNFINISHED = ".incomplete"  # suffix of huggingface_hub's unfinished downloads


@dataclass(frozen=True)
class StoredModel:
    """A model in a cache folder: a download, or a packed model.

    Attributes:
        source: str, source in the form of model.checkpoint; for a packed model, its path.
        file: str, name of the file; for a repository, "org/name".
        path: Path, file or folder that `remove` deletes.
        nbytes: int, bytes on disk.
        is_whole: bool, True if the download was finished.
        last_used: float, time of the last use, in seconds since the epoch; for a repository, time of the last access
            to its files.
    """

    source: str
    file: str
    path: Path
    nbytes: int
    is_whole: bool
    last_used: float


def cached_models(cache_dir: Path) -> list[StoredModel]:
    """Return all models in graphcore's cache folder and in huggingface_hub's: packages, repositories, packed models.

    Raises:
        CheckpointError: a folder cannot be read.
    """
    with writable(cache_dir):
        packages = [_package(entry) for entry in _folders(cache_dir / "pypi")]
        packed = [
            StoredModel(str(path), path.name, path, path.stat().st_size, True, path.stat().st_atime)
            for path in sorted((cache_dir / "benchmarks").glob("*.gguf"))
        ]
    cache = hub_cache()
    with writable(cache, setting="HF_HUB_CACHE"):
        repositories = [_repository(entry) for entry in _folders(cache) if entry.name.startswith(REPOSITORY)]
    return [model for model in (*packages, *repositories, *packed) if model.nbytes]


def nbytes_of(path: Path) -> int:
    """Return the bytes of all files in a folder; links do not count."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def remove(model: StoredModel) -> None:
    """Delete a model from the cache.

    Raises:
        CheckpointError: a file cannot be deleted.
    """
    if (model.path / LOCK_NAME).exists():
        with locked_entry(model.path, on_wait=lambda: None):
            for path in model.path.iterdir():
                if path.name != LOCK_NAME:  # a process that waits for the lock then downloads the file again
                    _delete(path)
        return
    is_repository = model.path.name.startswith(REPOSITORY)
    with writable(model.path, setting="HF_HUB_CACHE" if is_repository else "cache_dir"):
        if is_repository:
            _delete_snapshots(model.path)
        _delete(model.path)
        _delete(model.path.parent / ".locks" / model.path.name)


def _delete_snapshots(entry: Path) -> None:
    """Delete a repository with huggingface_hub, which also deletes files that no other repository shares with it.

    Nothing is deleted of a repository without a snapshot, because the library does not list it.
    """
    from huggingface_hub import scan_cache_dir

    found = scan_cache_dir(entry.parent)
    repositories = frozenset(one for one in found.repos if one.repo_path == entry.resolve())
    commits = {revision.commit_hash for one in repositories for revision in one.revisions}
    # Copies of a repository have the same commits, so the library may see only this one.
    replace(found, repos=repositories).delete_revisions(*commits).execute()


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _package(entry: Path) -> StoredModel:
    """Return the model of a package's entry; for an unfinished download only the folder is known."""
    lock = entry / LOCK_NAME
    used = (lock if lock.exists() else entry).stat().st_mtime
    found = find_whole(entry)
    if found is None:
        return StoredModel("pypi:", entry.name, entry, nbytes_of(entry), False, used)
    path, record = found
    return StoredModel(record.source, path.name, entry, record.nbytes, True, used)


def _repository(entry: Path) -> StoredModel:
    """Return a repository's model. The library's own scan leaves out damaged ones, and those without a whole file."""
    name = entry.name.removeprefix(REPOSITORY).replace("--", "/")
    blobs = [path for path in (entry / "blobs").glob("*") if path.is_file()]
    shared = sum(blob.stat().st_size for blob in blobs if blob.is_symlink())  # in the library's shared store
    is_whole = not any(blob.name.endswith(UNFINISHED) for blob in blobs)
    used = max((max(blob.stat().st_atime, blob.stat().st_mtime) for blob in blobs), default=0.0)
    return StoredModel(f"hf:{name}", name, entry, nbytes_of(entry) + shared, is_whole, used)
