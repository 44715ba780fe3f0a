"""Random blocks of the formats of Hugging Face's folders, and their weights by numpy, from the formats' definitions."""

import numpy as np
import numpy.typing as npt

from graphcore.encodings import E2M1_DOUBLED, FP4_LEVELS, NF4_LEVELS
from graphcore.quant import FORMATS

Bytes = npt.NDArray[np.uint8]
SCALE_NBYTES = {"affine4": 2, "affine8": 4, "fp8": 4, "nf4": 4, "fp4": 4, "nvfp4_f32": 4}
FOLDER_FORMATS = tuple(SCALE_NBYTES)
HAS_ZERO = ("affine4", "affine8")


def put_scales(name: str, blocks: Bytes, rng: np.random.Generator, is_tame: bool) -> None:
    """Overwrite the scales and zero points of random blocks [N, W], and replace codes that are NaN.

    Args:
        is_tame: scales of 0.01 to 0.03 and zeros about the middle, so that sums mean something; else finite ones.
    """
    kind, middle = np.dtype(f"<f{SCALE_NBYTES[name]}"), {"affine4": 8, "affine8": 128}.get(name)
    if is_tame:
        scales = rng.uniform(0.01, 0.03, len(blocks)) / (16 if name in ("affine8", "fp8") else 1)
    else:
        largest = 250 if name == "affine4" else 1e30  # no weight overflows
        scales = rng.choice([-1, 1], len(blocks)) * rng.uniform(0, 1, len(blocks)) ** 9 * largest
    blocks[:, : kind.itemsize] = scales.astype(kind).view(np.uint8).reshape(-1, kind.itemsize)
    if name == "nvfp4_f32":
        blocks[:, 4:8] = rng.permutation(blocks[:, :4])
    if middle is not None and is_tame:
        blocks[:, kind.itemsize] = rng.integers(middle // 2, middle + middle // 2, len(blocks))
    if name == "fp8":
        codes = blocks[:, kind.itemsize :]
        codes[(codes & 0x7F) == 0x7F] -= 1


def folder_weights(name: str, blocks: Bytes) -> npt.NDArray[np.float32]:
    """Return the weights of blocks [N, W], rounded once: [N, 32] float32."""
    nbytes, num_scales = SCALE_NBYTES[name], 1 + (name == "nvfp4_f32")
    scale = blocks[:, : nbytes * num_scales].copy().view(f"<f{nbytes}").astype(np.float64)
    scale = scale.repeat(32 // num_scales, axis=1)
    codes = blocks[:, nbytes * num_scales + (name in HAS_ZERO) :]
    if name not in ("affine8", "fp8"):
        codes = np.concatenate((codes & 15, codes >> 4), axis=1)
    if name in HAS_ZERO:
        values = codes.astype(np.float64) - blocks[:, nbytes : nbytes + 1]
    elif name == "fp8":
        exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float64)
        size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7))
        values = np.where(codes & 127 == 127, np.nan, np.where(codes & 128, -size, size))
    else:
        levels = {"nf4": NF4_LEVELS, "fp4": FP4_LEVELS, "nvfp4_f32": E2M1_DOUBLED}[name]
        values = np.array(levels, np.float32)[codes].astype(np.float64)
    return (values * scale).astype(np.float32)


def folder_blocks(name: str, count: int, seed: int = 0, is_tame: bool = False) -> Bytes:
    """Return random blocks, [N, W]; the first ones are zeros, and the largest codes with a large scale."""
    rng = np.random.default_rng([*name.encode(), seed])
    blocks = rng.integers(0, 256, (count, FORMATS[name].block_nbytes), dtype=np.uint8)
    blocks[0], blocks[1] = 0, 255
    put_scales(name, blocks, rng, is_tame)
    return blocks
