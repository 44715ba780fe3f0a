"""A checkpoint without a file: seeded random weights in a model's real shapes, for benchmarks and sweeps.

    random:         every weight is drawn; 8 billion take minutes
    random:FORMAT   POOL blocks of FORMAT are drawn, and tensors are made of these blocks, at the speed of memory

The packed bytes are valid, as in a real model, and the rows of a matrix differ. Repeated blocks do not change speeds,
because kernels do not depend on the values of weights.
"""

import hashlib
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from graphcore.arch.architecture import split_layer
from graphcore.arch.weight_map import weight_shapes
from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.nn.decoder import EXPERTS, Decoder
from graphcore.nn.spec import ModelSpec
from graphcore.quant import FORMATS
from graphcore.quant.format_choice import choose_format, packable
from graphcore.quant.formats.i2_s import I2_S
from graphcore.quant.formats.mxfp4 import MXFP4

STANDARD_DEVIATION = 0.02  # standard deviation of the weights of every matrix, as in usual initialisation
TERNARY_SCALE = STANDARD_DEVIATION * 1.5**0.5  # -1, 0 and 1 in equal numbers have a variance of 2/3
POOL = 4096  # number of blocks that are drawn for each encoding
DENSE = 256  # number of weights in a block of a dense encoding
# Exponents of mxfp4 scales, 2^-8 and 2^-7: the codes have a root mean square of 2.93, so the weights have about 0.018.
EXPONENTS = (119, 121)


class RandomCheckpoint(Checkpoint):
    """A checkpoint of random weights under the decoder's own names: bf16, experts mxfp4; norms are 1, biases 0.

    With a format, matrices are stored as `quant=FORMAT` would pack them, and all of them are made of repeated blocks.
    That takes seconds, while drawing each weight takes minutes. Experts whose rows are no whole blocks stay mxfp4.

    Without one, experts are drawn packed, because those of one gpt-oss layer have 800 million weights. Projections with
    int8 activations have ternary weights, in i2_s if their size is a whole number of groups.

    A tensor depends only on its name and the seed, so that cutting a model's layers does not change the others.
    """

    def __init__(self, spec: ModelSpec, seed: int, format_name: str = "") -> None:
        """List the tensors of a spec; nothing is drawn yet.

        Args:
            spec: spec of the model.
            seed: seed of all tensors.
            format_name: format of the matrices; empty if every weight is drawn.

        Raises:
            UnsupportedError: dense weights cannot be packed in the format.
        """
        self.source = f"random:{format_name}"
        self.layout = "decoder"
        self.seed = seed
        self.pools: dict[str, torch.Tensor] | None = {} if format_name else None
        asked = packable(format_name).name if format_name else "bf16"
        with torch.device("meta"):
            decoder = Decoder(spec, torch.bfloat16)
        names = {
            name: shape
            for name, shape in weight_shapes(decoder).items()
            if not (spec.tied and name == "lm_head.weight") and not name.endswith("weight_scale")
        }
        self.tensors = MappingProxyType(
            {name: _info(name, shape, _encoding_of(spec, name, shape, asked)) for name, shape in names.items()}
        )

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return an empty tuple, because no file holds the tensor."""
        self.find(name)
        return ()

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Draw and return the tensor: bf16, or uint8 [nbytes] if it is packed."""
        info = self.find(name)
        shape = info.shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device="cpu")
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=torch.bfloat16, device="cpu")
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        if name.endswith(".rate"):  # a positive one would let the state of a delta rule grow without end
            return torch.empty(shape, dtype=torch.bfloat16, device="cpu").uniform_(-1.0, -0.01, generator=generator)
        if self.pools is not None and len(shape) > 1:
            return self._picked(info, generator)
        if info.encoding == MXFP4.name:
            return _random_blocks(info.nbytes, generator)
        if info.encoding == I2_S.name:
            return _random_ternary(shape, generator)
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
        return tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)

    def _picked(self, info: TensorInfo, generator: torch.Generator) -> torch.Tensor:
        """Return the tensor made of blocks from its encoding's pool, which is drawn at first use."""
        assert self.pools is not None, "random: draws every weight"
        if info.encoding not in self.pools:
            self.pools[info.encoding] = draw_pool(info.encoding, self.seed)
        picked = pick_blocks(self.pools[info.encoding], info.encoding, info.shape, generator)
        dtype = DENSE_DTYPES.get(info.encoding)
        return picked if dtype is None else picked.view(dtype).view(info.shape)


def _encoding_of(spec: ModelSpec, name: str, shape: Sequence[int], asked: str) -> str:
    """Return the encoding of a weight: i2_s for ternary weights, if their sizes allow, and what was asked for others.

    Experts [X, O, I] get mxfp4 if their rows are not whole blocks of the format that was asked for, or if it is dense.
    Weights that the format does not pack get bf16.
    """
    index, _ = split_layer(name)
    is_packed, is_of_experts = asked not in DENSE_DTYPES, EXPERTS in name and len(shape) == 3
    if is_of_experts and MXFP4.divides(shape) and not (is_packed and FORMATS[asked].divides(shape)):
        return MXFP4.name
    is_ternary = index is not None and spec.blocks[index].int8_activations is not None and len(shape) == 2
    if is_ternary and I2_S.divides(shape):
        return I2_S.name
    return (choose_format(name, shape, asked, spec.tied) if is_packed and len(shape) > 1 else None) or "bf16"


def _info(name: str, shape: tuple[int, ...], encoding: str) -> TensorInfo:
    return TensorInfo(name, shape, encoding, None, 0, FORMATS[encoding].nbytes(shape))


def _random_blocks(nbytes: int, generator: torch.Generator) -> torch.Tensor:
    """Return random mxfp4 blocks with similar scales: [nbytes] uint8."""
    blocks = torch.empty(nbytes, dtype=torch.uint8, device="cpu").random_(0, 256, generator=generator)
    exponents = blocks.view(-1, MXFP4.block_nbytes)[:, 0]
    exponents.random_(*EXPONENTS, generator=generator)
    return blocks


def _random_ternary(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return the bytes of a random i2_s tensor."""
    codes = ternary_bytes(I2_S.nbytes(shape) - I2_S.tail_nbytes, generator)
    return FORMATS[I2_S.name].join_rows(codes, TERNARY_SCALE)


def draw_pool(encoding: str, seed: int) -> Tensor:
    """Return random blocks [POOL, W] uint8: ternary codes for formats with one scale per tensor, else normal weights.

    Raises:
        UnsupportedError: weights cannot be packed in this format.
    """
    generator = torch.Generator().manual_seed(seed)
    one = FORMATS[encoding]
    if one.has_tensor_scale:
        return ternary_bytes(POOL * one.block_nbytes, generator).view(POOL, one.block_nbytes)
    elements = DENSE if one.is_dense else one.block_elements
    weights = torch.empty(POOL, elements, dtype=torch.float32, device="cpu").normal_(
        0.0, STANDARD_DEVIATION, generator=generator
    )
    return one.quantize(weights).view(POOL, -1)


def pick_blocks(pool: Tensor, encoding: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a tensor's stored bytes, made of randomly picked blocks of the pool: [nbytes] uint8."""
    one = FORMATS[encoding]
    nbytes = one.nbytes(shape) - one.tail_nbytes
    count = -(-nbytes // pool.shape[1])
    places = torch.randint(len(pool), (count,), generator=generator, dtype=torch.int32, device="cpu")
    picked = pool.index_select(0, places).view(-1)[:nbytes]
    return one.join_rows(picked, TERNARY_SCALE)


def ternary_bytes(nbytes: int, generator: torch.Generator) -> Tensor:
    """Return random bytes that each hold four codes of 0, 1 or 2: [nbytes] uint8; 81 values are possible."""
    code = torch.arange(3, dtype=torch.uint8, device="cpu")
    bytes_of_codes = torch.cartesian_prod(code << 6, code << 4, code << 2, code).sum(1, dtype=torch.uint8)  # [81]
    return bytes_of_codes[torch.randint(0, 81, (nbytes,), generator=generator, dtype=torch.int64, device="cpu")]
