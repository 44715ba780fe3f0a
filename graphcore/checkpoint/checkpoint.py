"""The one view of a checkpoint that the floors above have: names, places, and bytes on request.

A reader opens its files, checks every header against the file's size, and reads no tensor until it is asked to.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from graphcore.checkpoint.file_bytes import read_span
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.span import Span
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.errors import CheckpointError
from graphcore.registry import nearest


class Checkpoint(ABC):
    """Names, shapes and bytes of one stored model.

    Attributes:
        source: what the user asked for, for messages.
        layout: whose naming and folding rules apply: "hf" or "gguf".
        tensors: by name, in file order.
        files: what each file that a span names was when its header was read.
    """

    source: str
    layout: str
    tensors: Mapping[str, TensorInfo]
    files: Mapping[Path, FileIdentity] = MappingProxyType({})

    def find(self, name: str) -> TensorInfo:
        """Return what is known of the tensor `name`.

        Raises:
            CheckpointError: the checkpoint has no such tensor; the message has the nearest name.
        """
        if name in self.tensors:
            return self.tensors[name]
        raise CheckpointError(f"{self.source}: has no tensor {quoted(name)}{nearest(name, self.tensors)}")

    @abstractmethod
    def spans(self, name: str) -> tuple[Span, ...]:
        """Return the runs of bytes that make the tensor up, in the order that `assemble` wants.

        A checkpoint that makes its tensors has none, and `assemble` then makes the tensor out of nothing.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """

    @abstractmethod
    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what `read` returns, from bytes that were read elsewhere.

        The result may share memory with the parts: copy it before they are overwritten.

        Args:
            parts: one for each of the tensor's spans: uint8 [span.nbytes], contiguous, at any address; they may be
                views of a larger buffer. They are not written to.

        Raises:
            CheckpointError: the bytes are not what such a tensor can hold.
        """

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, in memory of its own.

        Dense encodings: the stored dtype and shape. Packed encodings: uint8 [nbytes], as the file has them.

        Raises:
            CheckpointError: a file no longer holds what its header promised, or changed since.
        """
        return self.assemble(name, [read_span(span, self.files[span.file], name) for span in self.spans(name)])
