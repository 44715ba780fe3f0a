"""A saved cache: one safetensors file with the KV cache of a prompt's prefix.

    token_ids                                   int32 [tokens]
    pages.<table>.<cache>.<keys or values>      pages of each table
    states.<position>.<layer>.<kind>            snapshots of recurrent states

The metadata have a version, the fingerprint (fingerprint.py), the snapshot's shape (`SnapshotShape`), and a sha256 of
all that and of the tensors. The safetensors library writes files, and checks a header against its file.
Names, dtypes and shapes follow from the metadata and the model, and a file that has others is refused before any tensor
is read.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.errors import ConfigError, quoted
from graphcore.kvcache.fingerprint import difference
from graphcore.kvcache.prefix_snapshot import PrefixSnapshot, PrefixSnapshots, SnapshotShape
from graphcore.kvcache.swap_file import bytes_of

VERSION_KEY, VERSION = "graphcore_cache", "2"
DIGEST, TOKEN_IDS = "sha256", "token_ids"
ID_DTYPE = torch.int32
MAX_HEADER = 1 << 24  # bytes; a model of 100 layers has 30 KB, the library would parse 100 MB
NAMES = {dtype: name.upper() for name, dtype in DENSE_DTYPES.items()}


class UnfinishedCache:
    """A saved cache in a folder beside the path whose name it gets when it is finished; else `drop` removes it.

    Args:
        path: path of the file that it becomes.
        scratch: folder beside the path that the file `cache` is in.
    """

    def __init__(self, path: Path, scratch: "tempfile.TemporaryDirectory[str]") -> None:
        self._path, self._scratch = path, scratch
        self._file = Path(scratch.name) / "cache"
        self._before = Path(f"{scratch.name}.before")  # the file that had the name, between `rename` and `drop`
        self._is_stuck = False  # True if that file could not be put back, so that it must not be removed

    @classmethod
    def write(
        cls, path: Path, copy: PrefixSnapshot, copies: PrefixSnapshots, fingerprint: Mapping[str, str]
    ) -> "UnfinishedCache":
        """Write a snapshot beside a path, all or nothing.

        Raises:
            ConfigError: it cannot be written, its disk is full, or another file has that name.
        """
        parts = [tensor.contiguous() for part in copy.parts for tensor in part]
        ids = torch.tensor(copy.ids, dtype=ID_DTYPE, device="cpu")
        tensors = {TOKEN_IDS: ids, **dict(zip(copies.layout(copy.shape), parts, strict=True))}
        metadata = cache_metadata(copy.shape, fingerprint)
        metadata[DIGEST] = cache_digest(metadata, tensors)
        with _written(path), ExitStack() as undo:
            check_replaceable(path)
            scratch = tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-")
            undo.enter_context(scratch)
            unfinished = Path(scratch.name) / "cache"
            unfinished.touch()
            mode = unfinished.stat().st_mode  # by the umask; only the owner can read files that safetensors creates
            save_file(tensors, unfinished, metadata)
            unfinished.chmod(mode)
            undo.pop_all()
        return cls(path, scratch)

    def finish(self) -> None:
        """Give the file its name.

        Raises:
            ConfigError: it cannot have it; a file of that name stays as it was.
        """
        with _written(self._path), self._scratch:
            self._file.replace(self._path)

    def rename(self) -> None:
        """Give the file its name, which `take_back` takes from it again, until `drop`.

        Raises:
            ConfigError: it cannot have it; a file of that name stays as it was.
        """
        with _written(self._path):
            if os.path.lexists(self._path):
                self._keep_before()
            self._file.replace(self._path)

    def take_back(self) -> str:
        """Undo `rename`, also one that has raised; return what could not be undone, empty if everything was."""
        try:
            if os.path.lexists(self._before):
                self._before.replace(self._path)
            elif not self._file.exists():
                self._path.unlink()
        except OSError as error:
            self._is_stuck = os.path.lexists(self._before)
            left = "is new and cannot be removed" if os.path.lexists(self._path) else "is gone"
            old = f"; the file that had its name is {self._before}" if self._is_stuck else ""
            return f"{self._path} {left}: {error.strerror}{old}"
        return ""

    def drop(self) -> None:
        """Remove the file, unless it has its name, and the one that had the name before, unless no other has it now."""
        try:
            if os.path.lexists(self._before) and not os.path.lexists(self._path):
                self._before.replace(self._path)
            elif not self._is_stuck:
                self._before.unlink(missing_ok=True)
        finally:
            self._scratch.cleanup()

    def _keep_before(self) -> None:
        """Keep the file of that name under another one, too, so that its name is never without a file."""
        try:
            os.link(self._path, self._before, follow_symlinks=False)
        except OSError:  # a file system without hard links
            self._path.rename(self._before)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Turn errors of writing a file into advice."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: the cache cannot be written there: {reason}; name another file") from error


def check_replaceable(path: Path) -> None:
    """Check that a path does not exist yet, or is a saved cache (possibly damaged) or an empty file.

    Raises:
        ConfigError: the path is another file, which must not be replaced by mistake, or no regular file.
        OSError: the file cannot be read.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{path}: is no regular file; cache.save writes one")
    with path.open("rb") as file:
        front = file.read(MAX_HEADER)
    if front and not (front.startswith(b'{"__metadata__":', 8) and f'"{VERSION_KEY}":'.encode() in front):
        raise ConfigError(f"{path}: exists and is not a saved cache, so it is not overwritten; name another file")


def cache_metadata(shape: SnapshotShape, fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file, without its sha256."""
    counts = {"tokens": [shape.tokens], "first_pages": shape.firsts, "states": shape.positions}
    return {VERSION_KEY: VERSION, **{key: ",".join(map(str, each)) for key, each in counts.items()}, **fingerprint}


def cache_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of metadata and of the bytes of contiguous tensors, both by name, in hexadecimal digits."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()


def read_cache(path: Path, copies: PrefixSnapshots, fingerprint: Mapping[str, str]) -> PrefixSnapshot:
    """Read a snapshot that `UnfinishedCache.write` wrote, checking every byte.

    Raises:
        ConfigError: there is no such file, it is damaged, or it belongs to another model or other settings.
    """
    # A file that is truncated while it is mapped kills the process (SIGBUS), so it is read.
    with _explained(path), safe_open(path, "pt", backend="pread") as file:
        saved = dict(file.metadata() or {})
        _check_version(saved, path)
        if differs := difference(saved, fingerprint):
            raise ConfigError(f"{path}: {differs}")
        digest, shape = saved.pop(DIGEST, ""), _shape(saved, path)
        if shape.tokens > copies.context:
            raise ConfigError(
                f"{path}: has {shape.tokens} tokens, which do not fit in context_length={copies.context}; set "
                f"context_length to at least {shape.tokens}"
            )
        about = {key: saved.get(key, "") for key in fingerprint}
        if saved != cache_metadata(shape, about) or not copies.is_possible(shape):
            raise damaged(path, "its metadata is inconsistent")
        layout = {TOKEN_IDS: (ID_DTYPE, (shape.tokens,)), **copies.layout(shape)}
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        found = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
        if found != {name: (NAMES[dtype], sizes) for name, (dtype, sizes) in layout.items()}:
            raise damaged(path, "its tensors do not match its metadata")
        tensors = {name: file.get_tensor(name) for name in layout}
        if cache_digest(saved, tensors) != digest:
            raise damaged(path, "its sha256 does not match its contents")
    ids, *parts = tensors.values()
    return PrefixSnapshot(shape, tuple(ids.tolist()), list(zip(parts[::2], parts[1::2], strict=True)))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Check that a path names a file whose header can be parsed, and turn errors of reading it into advice."""
    takes = "cache.load takes a file that cache.save wrote"
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: {'is no regular file' if path.exists() else 'no such file'}; {takes}")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, MAX_HEADER))
        if length > len(header) or not header.rstrip(b" ").endswith(b"}"):
            raise ConfigError(f"{path}: is not a saved cache, or is cut off; {takes}")
        yield
    except SafetensorError as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}; check its permissions") from error


def damaged(path: Path, reason: str) -> ConfigError:
    """Return the error for a damaged file."""
    return ConfigError(f"{path}: is a damaged cache: {reason}; save it again")


def _check_version(saved: Mapping[str, str], path: Path) -> None:
    if VERSION_KEY not in saved:
        raise ConfigError(f"{path}: is a safetensors file, but no saved cache; cache.load takes what cache.save wrote")
    if saved[VERSION_KEY] != VERSION:
        raise ConfigError(
            f"{path}: is a saved cache of version {quoted(saved[VERSION_KEY])}, and this graphcore reads {VERSION}; "
            "save it again"
        )


def _shape(saved: Mapping[str, str], path: Path) -> SnapshotShape:
    try:
        (tokens,), firsts, positions = (
            tuple(int(word) for word in saved[key].split(",") if word) for key in ("tokens", "first_pages", "states")
        )
    except (KeyError, ValueError) as error:
        raise damaged(path, "its metadata is malformed") from error
    return SnapshotShape(tokens, firsts, positions)
