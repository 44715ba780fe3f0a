"""A checkpoint without a file: seeded random weights of a model's true shape, for benchmarks and sweeps."""

import hashlib
from collections.abc import Sequence
from types import MappingProxyType

import torch

from graphcore.arch.architecture import split_layer
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.i2_s_bytes import ENCODING, fits_i2_s, with_i2_s_tail
from graphcore.checkpoint.span import Span
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec
from graphcore.quant import FORMATS

STANDARD_DEVIATION = 0.02  # of every matrix, as models are initialised
# Of mxfp4 scales, 2^-8 and 2^-7: the sixteen codes have a root mean square of 2.93, and so the weights one of 0.018.
EXPONENTS = (119, 121)
TERNARY_SCALE = STANDARD_DEVIATION * 1.5**0.5  # -1, 0 and 1 in equal numbers have a variance of 2/3


class RandomCheckpoint(Checkpoint):
    """Weights under the decoder's own names, in bf16, experts in mxfp4; norms are one, biases zero.

    Experts are drawn packed: those of one gpt-oss layer are 800 million weights.

    Where projections take int8 activations, their weights are ternary: i2_s, if their size is a whole number of groups.

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
            if not (spec.tied and name == "lm_head.weight") and not name.endswith("weight_scale")
        }
        self.tensors = MappingProxyType(
            {name: _info(name, shape, _encoding_of(spec, name, shape)) for name, shape in names.items()}
        )

    def spans(self, name: str) -> tuple[Span, ...]:
        """Return nothing: no file has the tensor."""
        self.find(name)
        return ()

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor, drawn anew: bf16, or uint8 [nbytes] of a packed format."""
        info = self.find(name)
        shape = info.shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=torch.bfloat16)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        if info.encoding == "mxfp4":
            return _random_blocks(info.nbytes, generator)
        if info.encoding == ENCODING:
            return _random_ternary(shape, generator)
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        return tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _encoding_of(spec: ModelSpec, name: str, shape: Sequence[int]) -> str:
    """Return mxfp4 for the weights of experts, [X, O, I], i2_s for ternary ones, where sizes allow, else bf16."""
    index, _ = split_layer(name)
    if len(shape) == 3 and shape[-1] % FORMATS["mxfp4"].block_elements == 0:
        return "mxfp4"
    is_ternary = index is not None and spec.blocks[index].int8_activations is not None and len(shape) == 2
    return ENCODING if is_ternary and fits_i2_s(shape) else "bf16"


def _info(name: str, shape: tuple[int, ...], encoding: str) -> TensorInfo:
    return TensorInfo(name, shape, encoding, None, 0, FORMATS[encoding].nbytes(shape))


def _random_blocks(nbytes: int, generator: torch.Generator) -> torch.Tensor:
    """Return random codes under scales near each other: [nbytes] uint8."""
    blocks = torch.empty(nbytes, dtype=torch.uint8).random_(0, 256, generator=generator)
    exponents = blocks.view(-1, FORMATS["mxfp4"].block_nbytes)[:, 0]
    exponents.random_(*EXPONENTS, generator=generator)
    return blocks


def _random_ternary(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return the bytes of an i2_s tensor; each holds four codes of 0, 1 or 2, so there are 81 to draw from."""
    code = torch.arange(3, dtype=torch.uint8)
    bytes_of_codes = torch.cartesian_prod(code << 6, code << 4, code << 2, code).sum(1, dtype=torch.uint8)  # [81]
    drawn = torch.randint(0, 81, (torch.Size(shape).numel() // 4,), generator=generator)
    return with_i2_s_tail(bytes_of_codes[drawn], torch.tensor(TERNARY_SCALE))
