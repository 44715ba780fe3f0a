"""A checkpoint without a file: seeded random weights of a model's true shape, for benchmarks and sweeps."""

import hashlib
from types import MappingProxyType

import torch

from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec

STANDARD_DEVIATION = 0.02  # of every matrix, as models are initialised


class RandomCheckpoint(Checkpoint):
    """Weights under the decoder's own names, in bf16; norms are one, biases zero.

    A tensor depends on its name and the seed alone, so that cutting layers does not change those that stay.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.source = "random:"
        self.layout = "decoder"
        self.seed = seed
        with torch.device("meta"):
            decoder = Decoder(spec, torch.bfloat16)
        names = {
            prefix + name: tuple(tensor.shape)
            for prefix, module in decoder.groups()
            for name, tensor in module.named_buffers()
            if not (spec.tied and name == "lm_head.weight")
        }
        self.tensors = MappingProxyType(
            {
                name: TensorInfo(name, shape, "bf16", None, 0, 2 * torch.Size(shape).numel())
                for name, shape in names.items()
            }
        )

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor, bf16."""
        shape = self.find(name).shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=torch.bfloat16)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        return tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)
