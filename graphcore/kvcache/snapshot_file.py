"""A saved cache: one safetensors file with what the KV cache holds of a prompt's beginning.

    u64 header length | header, JSON | token ids | pages, table by table | snapshots of states | sha256 of all before it

The header's __metadata__ has a version, the fingerprint under which the bits hold (fingerprint.py), and how much of
a prompt there is. Everything else in the header follows from that and the model, so a reader makes the header itself
and compares: whatever a damaged or hostile file says of dtypes, shapes and offsets, nothing of it is ever believed.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.json_object import parse_json_object
from graphcore.errors import CheckpointError, ConfigError, quoted
from graphcore.kvcache.fingerprint import difference
from graphcore.kvcache.prefix_snapshot import PrefixSnapshot, PrefixSnapshots, SnapshotShape
from graphcore.kvcache.swap_file import bytes_of

VERSION_KEY, VERSION = "graphcore_cache", "1"
FRONT = f'{{"__metadata__": {{"{VERSION_KEY}": '.encode()  # of a header, whatever the version
MOST_HEADER = 1 << 24  # bytes; a model of 100 layers has 30 KB
ID_DTYPE = torch.int32
DIGEST = "sha256"
NAMES = {dtype: name.upper() for name, dtype in DENSE_DTYPES.items()}

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_cache(path: Path, copy: PrefixSnapshot, copies: PrefixSnapshots, fingerprint: Mapping[str, str]) -> None:
    """Write a copy to a file, whole or not at all.

    Raises:
        ConfigError: the file cannot be written, its disk is full, or another file has that name; it stays as it was.
    """
    header = header_of(copies.layout(copy.shape), copy.shape, fingerprint)
    tensors = [
        torch.tensor(copy.ids, dtype=ID_DTYPE, device="cpu"),
        *(tensor.contiguous() for part in copy.parts for tensor in part),
    ]
    digest = hashlib.sha256()
    try:
        check_replaceable(path)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as scratch:
            unfinished = Path(scratch) / "cache"
            with unfinished.open("wb") as file:
                for piece in (memoryview(header), *map(bytes_of, tensors)):
                    digest.update(piece)
                    file.write(piece)
                file.write(digest.digest())
            unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: the cache cannot be written there: {error.strerror}; name another file") from error


def check_replaceable(path: Path) -> None:
    """Check that what has a path's name, if anything has, is a saved cache or an empty file.

    Raises:
        ConfigError: it is another file, which a slip must not replace, or none that could be replaced.
        OSError: it cannot be read.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{path}: is no regular file; cache.save writes one")
    with path.open("rb") as file:
        front = file.read(8 + len(FRONT))
    if front and front[8:] != FRONT:
        raise ConfigError(f"{path}: is there, and is no saved cache, so that it is left alone; name another file")


def header_of(parts: Layout, shape: SnapshotShape, fingerprint: Mapping[str, str]) -> bytes:
    """Return all that comes before the first tensor of a file."""
    tensors = {"token_ids": (ID_DTYPE, (shape.tokens,)), **parts, DIGEST: (torch.uint8, (32,))}
    counts = {"tokens": [shape.tokens], "first_pages": shape.firsts, "states": shape.positions}
    numbers = {key: ",".join(map(str, values)) for key, values in counts.items()}
    header: dict[str, object] = {"__metadata__": {VERSION_KEY: VERSION, **numbers, **fingerprint}}
    end = 0
    for name, (dtype, sizes) in tensors.items():
        begin, end = end, end + prod(sizes) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_cache(path: Path, copies: PrefixSnapshots, fingerprint: Mapping[str, str]) -> PrefixSnapshot:
    """Read a copy that `write_cache` wrote, checking every byte.

    Raises:
        ConfigError: there is no such file, it is damaged, or it belongs to another model or other settings.
    """
    with _explained(path), path.open("rb", buffering=0) as file:
        digest = hashlib.sha256()
        found = os.fstat(file.fileno()).st_size
        header = _read_header(file, found, path)
        digest.update(header)
        saved = _metadata(header, path)
        differs = difference(saved, fingerprint)
        if differs:
            raise ConfigError(f"{path}: {differs}")
        shape = _shape(saved, path)
        if shape.tokens > copies.context:
            raise ConfigError(
                f"{path}: has {shape.tokens} tokens, which do not fit in context_length={copies.context}; set "
                f"context_length to at least {shape.tokens}"
            )
        about = {key: saved[key] for key in fingerprint if key in saved}
        layout = copies.layout(shape) if copies.is_possible(shape) else None
        if layout is None or header_of(layout, shape, about) != header:
            raise damaged(path, "its header contradicts itself")
        nbytes = sum(prod(sizes) * dtype.itemsize for dtype, sizes in layout.values())
        size = len(header) + shape.tokens * ID_DTYPE.itemsize + nbytes + digest.digest_size
        if found != size:
            raise damaged(path, f"it has {found} bytes, not {size}")
        tensors = [torch.empty(shape.tokens, dtype=ID_DTYPE, device="cpu")]
        tensors += [torch.empty(sizes, dtype=dtype, device="cpu") for dtype, sizes in layout.values()]
        for tensor in tensors:
            _fill(file, tensor, path)
            digest.update(bytes_of(tensor))
        if file.read(digest.digest_size) != digest.digest():
            raise damaged(path, "its sha256 is another one than when it was written")
    ids, *others = tensors
    return PrefixSnapshot(shape, tuple(ids.tolist()), list(zip(others[::2], others[1::2], strict=True)))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        if not path.is_file():
            what = "is no regular file" if path.exists() else "no such file"
            raise ConfigError(f"{path}: {what}; cache.load takes a file that cache.save wrote")
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error


def damaged(path: Path, reason: str) -> ConfigError:
    """Return the error of a file that is not as it was written."""
    return ConfigError(f"{path}: is a damaged cache: {reason}; save it again")


def _read_header(file: BinaryIO, size: int, path: Path) -> bytes:
    front = file.read(8)
    length = int.from_bytes(front, "little")
    if len(front) < 8 or length > min(MOST_HEADER, size - 8):
        raise ConfigError(f"{path}: is no saved cache, or lost its end; cache.load takes what cache.save wrote")
    raw = front + file.read(length)
    if len(raw) != 8 + length:
        raise damaged(path, "it ends in its header")
    return raw


def _metadata(header: bytes, path: Path) -> Mapping[str, str]:
    """Return the texts that a header has about its file, all of them strings."""
    try:
        found = parse_json_object(header[8:], str(path)).get("__metadata__")
    except CheckpointError as error:
        raise damaged(path, "its header is no JSON") from error
    if not isinstance(found, dict) or VERSION_KEY not in found:
        raise ConfigError(f"{path}: is a safetensors file, but no saved cache; cache.load takes what cache.save wrote")
    if not all(isinstance(value, str) for value in found.values()):
        raise damaged(path, "its metadata are no texts")
    if found[VERSION_KEY] != VERSION:
        raise ConfigError(
            f"{path}: is a saved cache of version {quoted(found[VERSION_KEY])}, and this graphcore reads {VERSION}; "
            "save it again"
        )
    return found


def _shape(saved: Mapping[str, str], path: Path) -> SnapshotShape:
    try:
        tokens, firsts, positions = (
            tuple(int(word) for word in saved[key].split(",") if word) for key in ("tokens", "first_pages", "states")
        )
        (length,) = tokens
    except (KeyError, ValueError) as error:
        raise damaged(path, "its metadata are not those that were written") from error
    return SnapshotShape(length, firsts, positions)


def _fill(file: BinaryIO, tensor: Tensor, path: Path) -> None:
    left = bytes_of(tensor)
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]  # files without a buffer have it
        if not count:
            raise damaged(path, "it lost its end while it was read")
        left = left[count:]
