"""What a checkpoint says about one tensor before any of its bytes are read."""

from dataclasses import dataclass
from pathlib import Path

from graphcore.checkpoint.span import Span


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape, encoding and place of one stored tensor.

    Attributes:
        name: as the file has it.
        shape: torch order (rows first), in elements.
        encoding: lower-case name. Dense: f64 f32 f16 bf16 f8_e4m3 f8_e5m2 i64 i32 i16 i8 u64 u32 u16 u8 bool.
            Packed: the ggml type's name, such as q4_k.
        file: the file that holds the bytes, or None for a checkpoint that makes them.
        offset: of the first byte, from the start of the file.
        nbytes: stored size.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    file: Path | None
    offset: int
    nbytes: int

    def span(self) -> Span:
        """Return the tensor's bytes as a run of its file's."""
        assert self.file is not None, f"{self.name}: a tensor without a file has no span"
        return Span(self.file, self.offset, self.nbytes)
