"""A checkpoint without a file: seeded random weights of a model's true shape, for benchmarks and sweeps."""

import hashlib
from collections.abc import Sequence
from types import MappingProxyType

import torch

from graphcore.arch.architecture import split_layer
from graphcore.arch.random_blocks import STANDARD_DEVIATION, TERNARY_SCALE, draw_pool, pick_blocks, ternary_bytes
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.span import Span
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.encodings import I2_S, MXFP4
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec
from graphcore.quant import FORMATS
from graphcore.quant.choice import choose_format, packable

# Of mxfp4 scales, 2^-8 and 2^-7: the sixteen codes have a root mean square of 2.93, and so the weights one of 0.018.
EXPONENTS = (119, 121)


class RandomCheckpoint(Checkpoint):
    """Weights under the decoder's own names, in bf16, experts in mxfp4; norms are one, biases zero.

    Of a format's name, what would be bf16 is stored as `quant=FORMAT` would pack it, and everything is made of blocks
    that occur many times (random_blocks.py): that takes seconds where drawing each weight takes minutes.

    Experts are drawn packed: those of one gpt-oss layer are 800 million weights.

    Where projections take int8 activations, their weights are ternary: i2_s, if their size is a whole number of groups.

    A tensor depends on its name and the seed alone, so that cutting layers does not change those that stay.
    """

    def __init__(self, spec: ModelSpec, seed: int, format_name: str = "") -> None:
        """Name the tensors of a spec.

        Args:
            format_name: of the matrices; empty draws every weight by itself.

        Raises:
            UnsupportedError: dense weights cannot be packed as the format.
        """
        self.source = f"random:{format_name}"
        self.layout = "decoder"
        self.seed = seed
        self.pools: dict[str, torch.Tensor] | None = {} if format_name else None
        asked = packable(format_name).name if format_name else "bf16"
        with torch.device("meta"):
            decoder = Decoder(spec, torch.bfloat16)
        names = {
            prefix + name: tuple(tensor.shape)
            for prefix, module in decoder.groups()
            for name, tensor in module.named_buffers()
            if not (spec.tied and name == "lm_head.weight") and not name.endswith("weight_scale")
        }
        self.tensors = MappingProxyType(
            {name: _info(name, shape, _encoding_of(spec, name, shape, asked)) for name, shape in names.items()}
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
        if self.pools is not None and len(shape) > 1:
            return self._picked(info, generator)
        if info.encoding == MXFP4.name:
            return _random_blocks(info.nbytes, generator)
        if info.encoding == I2_S.name:
            return _random_ternary(shape, generator)
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        return tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)

    def _picked(self, info: TensorInfo, generator: torch.Generator) -> torch.Tensor:
        """Return the tensor made of blocks; those of an encoding are drawn at its first use."""
        assert self.pools is not None, "random: draws every weight"
        if info.encoding not in self.pools:
            self.pools[info.encoding] = draw_pool(info.encoding, self.seed)
        picked = pick_blocks(self.pools[info.encoding], info.encoding, info.shape, generator)
        dtype = DENSE_DTYPES.get(info.encoding)
        return picked if dtype is None else picked.view(dtype).view(info.shape)


def _encoding_of(spec: ModelSpec, name: str, shape: Sequence[int], asked: str) -> str:
    """Return mxfp4 for the weights of experts, [X, O, I], i2_s for ternary ones, where sizes allow, else what is asked.

    Where that packs no such weight, it is bf16.
    """
    index, _ = split_layer(name)
    if len(shape) == 3 and MXFP4.divides(shape):
        return MXFP4.name
    is_ternary = index is not None and spec.blocks[index].int8_activations is not None and len(shape) == 2
    if is_ternary and I2_S.divides(shape):
        return I2_S.name
    is_packed = asked not in DENSE_DTYPES and len(shape) == 2
    return (choose_format(name, shape, asked, spec.tied) if is_packed else None) or "bf16"


def _info(name: str, shape: tuple[int, ...], encoding: str) -> TensorInfo:
    return TensorInfo(name, shape, encoding, None, 0, FORMATS[encoding].nbytes(shape))


def _random_blocks(nbytes: int, generator: torch.Generator) -> torch.Tensor:
    """Return random codes under scales near each other: [nbytes] uint8."""
    blocks = torch.empty(nbytes, dtype=torch.uint8).random_(0, 256, generator=generator)
    exponents = blocks.view(-1, MXFP4.block_nbytes)[:, 0]
    exponents.random_(*EXPONENTS, generator=generator)
    return blocks


def _random_ternary(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return the bytes of an i2_s tensor."""
    codes = ternary_bytes(I2_S.nbytes(shape) - I2_S.tail_nbytes, generator)
    return FORMATS[I2_S.name].join_rows(codes, TERNARY_SCALE)
