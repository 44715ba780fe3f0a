"""The reader of primitive values in a GGUF header, from front to back and never past the end of the file.

Every count and length is compared with the remaining bytes before memory is allocated, so that a damaged length leads
to an error message and not to a huge allocation.

    string: u64 length | UTF-8 bytes            array: u32 value type | u64 count | values
    value types: 0 u8  1 i8  2 u16  3 i16  4 u32  5 i32  6 f32  7 bool  8 string  9 array  10 u64  11 i64  12 f64
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import BinaryIO, TypeAlias

import numpy as np

from graphcore.errors import CheckpointError, quoted

MetadataScalar: TypeAlias = bool | int | float | str
MetadataValue: TypeAlias = MetadataScalar | tuple[MetadataScalar, ...]

NUMBERS: Mapping[int, np.dtype[np.generic]] = MappingProxyType(
    {
        0: np.dtype("u1"),
        1: np.dtype("i1"),
        2: np.dtype("<u2"),
        3: np.dtype("<i2"),
        4: np.dtype("<u4"),
        5: np.dtype("<i4"),
        6: np.dtype("<f4"),
        7: np.dtype("u1"),
        10: np.dtype("<u8"),
        11: np.dtype("<i8"),
        12: np.dtype("<f8"),
    }
)
BOOL, STRING, ARRAY = 7, 8, 9

MAX_NAME = 65535  # bytes; the limit of a key in the GGUF specification
MAX_HEADER = 1 << 30  # bytes; the largest vocabularies take about 20 MB
MAX_ITEMS = 1 << 24  # number; the largest vocabularies have about half a million merges


class GGUFReader:
    """A reader of the values in the header of one GGUF file, which keeps its position.

    Args:
        stream: stream of the file, positioned at byte 0.
        size: bytes of the file.
        source: name of the file, for messages.

    Attributes:
        kinds: type numbers of the values read by `value`, by key: of the value, or of the array and its elements.
    """

    def __init__(self, stream: BinaryIO, size: int, source: str) -> None:
        self.source = source
        self.position = 0
        self.kinds: dict[str, tuple[int, ...]] = {}
        self._stream = stream
        self._end = min(size, MAX_HEADER)

    def take(self, nbytes: int, what: str) -> bytes:
        """Return the next `nbytes` bytes.

        Raises:
            CheckpointError: the file ends before that; the message names `what`.
        """
        if nbytes > self._end - self.position:
            raise self._cut_off(nbytes, what)
        taken = self._stream.read(nbytes)
        if len(taken) < nbytes:
            raise self._cut_off(nbytes, what)
        self.position += nbytes
        return taken

    def unsigned(self, nbytes: int, what: str) -> int:
        """Return the next unsigned integer of 4 or 8 bytes."""
        return int.from_bytes(self.take(nbytes, what), "little")

    def count(self, what: str, min_nbytes: int, limit: int = MAX_ITEMS) -> int:
        """Return the next u64, a count of items of at least `min_nbytes` each, which must fit in the bytes left."""
        count = self.unsigned(8, f"the number of {what}")
        left = self._end - self.position
        if count > min(limit, left // min_nbytes):
            raise CheckpointError(
                f"{self.source}: promises {count} {what}, more than the {left} bytes left can hold (limit {limit}); "
                "the file is damaged or cut off, fetch it again"
            )
        return count

    def string(self, what: str, limit: int = MAX_HEADER) -> str:
        """Return the next string of at most `limit` bytes; bytes that are not UTF-8 become surrogates."""
        return self.take(self.count(f"bytes in {what}", 1, limit), what).decode("utf-8", "surrogateescape")

    def name(self, what: str) -> str:
        """Return the next string of at most `MAX_NAME` bytes: the name of a key or a tensor."""
        return self.string(what, MAX_NAME)

    def value(self, key: str) -> MetadataValue:
        """Read the type of the value of `key`, then return the value.

        Raises:
            CheckpointError: the type is unknown, an array holds arrays, or a bool is neither 0 nor 1.
        """
        what = f"key {quoted(key)}"
        kind = self.unsigned(4, what)
        self.kinds[key] = (kind,)
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self._array(key, what)
        return self._numbers(kind, 1, what)[0]

    def _array(self, key: str, what: str) -> tuple[MetadataScalar, ...]:
        kind = self.unsigned(4, what)
        self.kinds[key] = (ARRAY, kind)
        if kind == ARRAY:
            raise CheckpointError(f"{self.source}: {what} is an array of arrays, which GGUF models do not have")
        if kind == STRING:
            return self._strings(self.count(f"strings in {what}", 8), what)
        width = self._dtype(kind, what).itemsize
        return self._numbers(kind, self.count(f"values in {what}", width), what)

    def _dtype(self, kind: int, what: str) -> np.dtype[np.generic]:
        if kind not in NUMBERS:
            raise CheckpointError(
                f"{self.source}: {what} has the unknown value type {kind}; the file is damaged, fetch it again"
            )
        return NUMBERS[kind]

    def _numbers(self, kind: int, count: int, what: str) -> tuple[MetadataScalar, ...]:
        dtype = self._dtype(kind, what)
        numbers = np.frombuffer(self.take(count * dtype.itemsize, what), dtype=dtype)
        if kind != BOOL:
            return tuple(numbers.tolist())
        if (numbers > 1).any():
            raise CheckpointError(f"{self.source}: {what} has a bool that is neither 0 nor 1; fetch the file again")
        return tuple(numbers.astype(bool).tolist())

    def _strings(self, count: int, what: str) -> tuple[str, ...]:
        # A vocabulary may have 300 000 strings, so there are no calls per string except the two reads.
        read, left, texts = self._stream.read, self._end - self.position, []
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            left -= 8 + length
            if left < 0:
                raise self._cut_off(length, what)
            texts.append(read(length))
        self.position = self._end - left
        if self._stream.tell() != self.position:
            raise self._cut_off(0, what)
        return tuple([text.decode("utf-8", "surrogateescape") for text in texts])

    def _cut_off(self, nbytes: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {what} needs {nbytes} bytes at byte {self.position}, the header can have only "
            f"{self._end - self.position} more; the file is damaged or cut off, fetch it again"
        )
