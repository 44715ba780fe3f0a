"""A checkpoint without a file: seeded random weights of a model's true shape, for benchmarks and sweeps."""

import hashlib
from types import MappingProxyType

import torch

from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec
from graphcore.quant import FORMATS

STANDARD_DEVIATION = 0.02  # of every matrix, as models are initialised
# Of mxfp4 scales, 2^-8 and 2^-7: the sixteen codes have a root mean square of 2.93, and so the weights one of 0.018.
EXPONENTS = (119, 121)


class RandomCheckpoint(Checkpoint):
    """Weights under the decoder's own names, in bf16, experts in mxfp4; norms are one, biases zero.

    Experts are drawn packed: those of one gpt-oss layer are 800 million weights.

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
                name: TensorInfo(name, shape, encoding, None, 0, FORMATS[encoding].nbytes(shape))
                for name, shape in names.items()
                for encoding in (_encoding_of(shape),)
            }
        )

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor: bf16, or uint8 [nbytes] of mxfp4 blocks."""
        shape = self.find(name).shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=torch.bfloat16)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        if self.tensors[name].encoding == "mxfp4":
            return _random_blocks(self.tensors[name].nbytes, generator)
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        return tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _encoding_of(shape: tuple[int, ...]) -> str:
    """Return mxfp4 for the weights of experts, [X, O, I], whose rows are whole blocks."""
    is_packed = len(shape) == 3 and shape[-1] % FORMATS["mxfp4"].block_elements == 0
    return "mxfp4" if is_packed else "bf16"


def _random_blocks(nbytes: int, generator: torch.Generator) -> torch.Tensor:
    """Return random codes under scales near each other: [nbytes] uint8."""
    blocks = torch.empty(nbytes, dtype=torch.uint8).random_(0, 256, generator=generator)
    exponents = blocks.view(-1, FORMATS["mxfp4"].block_nbytes)[:, 0]
    exponents.random_(*EXPONENTS, generator=generator)
    return blocks
