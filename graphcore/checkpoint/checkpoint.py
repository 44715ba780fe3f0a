"""The interface of a checkpoint: the names and places of its tensors, and their bytes on request.

A reader checks all headers against the sizes of the files when it is made. It reads tensors only on request.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from graphcore.checkpoint.file_bytes import FileSpan, read_span
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.errors import CheckpointError, quoted
from graphcore.registry import nearest


@dataclass(frozen=True)
class TensorInfo:
    """The name, shape, encoding and place of one stored tensor.

    Attributes:
        name: name in the file.
        shape: shape in torch order (rows first), in elements.
        encoding: name of the encoding, lower-case. Dense: f64 f32 f16 bf16 f8_e4m3 f8_e5m2 f8_e8m0 i64 i32 i16 i8 u64
            u32 u16 u8 bool. Packed: name of the ggml type, such as q4_k.
        file: file that holds the bytes; None if they are generated, or lie in several places.
        offset: byte offset of the tensor in the file.
        nbytes: bytes of the tensor in its encoding.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    file: Path | None
    offset: int
    nbytes: int

    def span(self) -> FileSpan:
        """Return the span of the tensor's bytes in its file."""
        assert self.file is not None, f"{self.name}: a tensor without a file has no span"
        return FileSpan(self.file, self.offset, self.nbytes)


class Checkpoint(ABC):
    """The stored tensors of one model.

    Attributes:
        source: name of the checkpoint as the user gave it, for messages.
        layout: naming and folding rules that apply: "hf", "gguf" or "decoder".
        tensors: description of each tensor, by name, in file order.
        files: identity of each file when its header was read, by path.
        faults: contradictions of the files about a tensor, by its name: messages that matter only if it is needed.
        notes: lines about what was changed or left out when the files were opened.
    """

    source: str
    layout: str
    tensors: Mapping[str, TensorInfo]
    files: Mapping[Path, FileIdentity] = MappingProxyType({})
    faults: Mapping[str, str] = MappingProxyType({})
    notes: Sequence[str] = ()

    def find(self, name: str) -> TensorInfo:
        """Return the description of the tensor `name`.

        Raises:
            CheckpointError: the checkpoint has no such tensor, and the message suggests the nearest name; or its files
                contradict each other about the tensor.
        """
        self.check_needed([name])
        if name in self.tensors:
            return self.tensors[name]
        raise CheckpointError(f"{self.source}: has no tensor {quoted(name)}{nearest(name, self.tensors)}")

    def check_needed(self, names: Iterable[str]) -> None:
        """Check that the files do not contradict each other about any of the tensors.

        Raises:
            CheckpointError: the files contradict each other about one of the tensors.
        """
        for name in names:
            if name in self.faults:
                raise CheckpointError(self.faults[name])

    def faults_of_parts(self, parts: Mapping[str, Iterable[str]]) -> Mapping[str, str]:
        """Return the faults of a view that makes tensors of several stored ones.

        Args:
            parts: names of the stored tensors of each of the view's tensors, by its name.
        """
        found = {whole: self.faults[one] for whole, names in parts.items() for one in names if one in self.faults}
        return MappingProxyType({**self.faults, **found})

    @abstractmethod
    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return the spans of a tensor's bytes, in the order that `assemble` needs.

        A checkpoint that generates its tensors has no spans; `assemble` then needs no parts.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """

    def matrix_spans(self, name: str, index: int) -> tuple[FileSpan, ...]:
        """Return the spans of one matrix of a tensor [X, R, C], such as an expert's, in the order of `spans`."""
        count = self.find(name).shape[0]
        runs = [(span, span.nbytes // count) for span in self.spans(name)]
        return tuple(FileSpan(span.file, span.offset + index * nbytes, nbytes) for span, nbytes in runs)

    def has_row_runs(self, name: str) -> bool:
        """Return whether each of the tensor's rows is a run of bytes in each of its spans, in the rows' order."""
        return name in self.tensors

    def is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias that changes nothing, where programs store one that the model has not."""
        assert name in self.tensors, f"{name} is not in {self.source}"
        return False

    @abstractmethod
    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor, as `read` does, from bytes that the caller has read.

        The result may share memory with the parts: copy it before they are overwritten.

        Args:
            parts: bytes of each of the tensor's spans: uint8 [span.nbytes], contiguous, at any alignment. They may be
                views of a larger buffer, and are not written to.

        Raises:
            CheckpointError: the bytes are not valid for the tensor.
        """

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor and return it on the CPU, in its own memory.

        A dense tensor has its stored dtype and shape. A packed tensor is uint8 [nbytes], as in the file.

        Raises:
            CheckpointError: a file changed, or is shorter than its header says.
        """
        return self.assemble(name, [read_span(span, self.files[span.file], name) for span in self.spans(name)])
