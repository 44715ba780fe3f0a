"""GGUF files written field by field, so that tests can write wrong ones. Little-endian, alignment 32."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STRING, ARRAY, U32, U16, I32 = 8, 9, 4, 2, 5


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


@dataclass
class Tensor:
    """One tensor's header entry (ne order) and bytes."""

    name: str = "w"
    ne: Sequence[int] = (4,)
    type_id: int = 0
    raw: bytes = bytes(range(16))
    offset: int | None = None


@dataclass
class GGUF:
    """A file as it is to be written; counts can lie."""

    entries: list[bytes] = field(default_factory=lambda: [entry("general.architecture", STRING, text("llama"))])
    tensors: list[Tensor] = field(default_factory=lambda: [Tensor()])
    version: int = 3
    num_tensors: int | None = None
    num_entries: int | None = None

    def to_bytes(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_entries = len(self.entries) if self.num_entries is None else self.num_entries
        header = b"GGUF" + struct.pack("<IQQ", self.version, num_tensors, num_entries) + b"".join(self.entries)
        section = b""
        for tensor in self.tensors:
            offset = len(section) if tensor.offset is None else tensor.offset
            header += text(tensor.name) + struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne)
            header += struct.pack("<IQ", tensor.type_id, offset)
            section += tensor.raw + bytes(-len(tensor.raw) % 32)
        return header + bytes(-len(header) % 32) + section

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path
