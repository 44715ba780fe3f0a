"""The one view of a checkpoint that the floors above have: names, places, and bytes on request.

A reader opens its files, checks every header against the file's size, and reads no tensor until it is asked to.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from graphcore.checkpoint.tensor_info import TensorInfo


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

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, in memory of its own.

        Dense encodings: the stored dtype and shape. Packed encodings: uint8 [nbytes], as the file has them.

        Raises:
            CheckpointError: the file no longer holds what its header promised.
        """
