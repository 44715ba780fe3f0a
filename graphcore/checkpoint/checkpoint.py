"""The one view of a checkpoint that the floors above have: names, places, and bytes on request.

A reader opens its files, checks every header against the file's size, and reads no tensor until it is asked to.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.errors import CheckpointError
from graphcore.registry import nearest


class Checkpoint(ABC):
    """Names, shapes and bytes of one stored model.

    Attributes:
        source: what the user asked for, for messages.
        layout: whose naming and folding rules apply: "hf" or "gguf".
        tensors: by name, in file order.
    """

    source: str
    layout: str
    tensors: Mapping[str, TensorInfo]

    def find(self, name: str) -> TensorInfo:
        """Return what is known of the tensor `name`.

        Raises:
            CheckpointError: the checkpoint has no such tensor; the message has the nearest name.
        """
        if name in self.tensors:
            return self.tensors[name]
        raise CheckpointError(f"{self.source}: has no tensor {quoted(name)}{nearest(name, self.tensors)}")

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, in memory of its own.

        Dense encodings: the stored dtype and shape. Packed encodings: uint8 [nbytes], as the file has them.

        Raises:
            CheckpointError: the file no longer holds what its header promised.
        """
