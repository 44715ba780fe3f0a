"""Random blocks of the formats of Hugging Face's folders, and their weights by numpy, from the formats' definitions."""

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from graphcore.compiler import prebuilt_name, targets_here
from graphcore.config.compose import compose_settings
from graphcore.device import cpu_flags
from graphcore.encodings import E2M1_DOUBLED, FP4_LEVELS, NF4_LEVELS
from graphcore.kernels.backend import NativeBackend
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.cpu.library import FORMAT_NUMBERS, PREBUILT, SOURCES, build_library, find_library
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


# Random matrices in every stored format that has a kernel, and the kernels built for several instruction sets.
#
# Legend: O rows (output features), I columns (input features), W bytes of a stored row.

GOLDEN = Path(__file__).parents[1] / "golden"
DENSE = ("f32", "f16", "bf16")
KERNEL_FORMATS = tuple(name for name in FORMAT_NUMBERS if name not in DENSE)
# Where each block keeps its float16 fields, from the layout table of ggml-common.h.
FLOAT16_FIELDS = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,), "tq2_0": (64,), "q1_0": (0,),
    "q2_0": (0,), "mxfp4": (), "nvfp4": (), "i2_s": (), "iq1_s": (0,), "iq1_m": (), "iq2_xxs": (0,), "iq2_xs": (0,),
    "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,), **dict.fromkeys(FOLDER_FORMATS, ()),
}  # fmt: skip

CENTRES = {"q4_1": 7.5, "q5_1": 15.5}  # of the codes: a minimum of that many steps makes weights of both signs
SIGNS = np.array([0, 0x8000], dtype="<u2")  # of a float16


@cache
def native_kernels() -> str:
    """Return the library that engines use on this machine, or skip the test that needs it."""
    folder = Path(compose_settings([]).cache_dir).expanduser() / "kernels"
    library = find_library(folder)
    if library is None:
        pytest.skip("no C++ compiler works here")
    return str(library)


def native_backend() -> NativeBackend:
    """Return the backend of engines on this machine's CPU, or skip the test that needs it."""
    return NativeBackend(native_kernels())


def kernels_for(target: str, folder: Path) -> str:
    """Return the library that pip has built for an x86-64 level, or one built now; skip where it could not run."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{target} is no target of a {platform.machine()} processor")
    (chosen,) = (one for one in targets_here() if one.name == target)
    missing = sorted(chosen.needs - cpu_flags())
    if missing:
        pytest.skip(f"this processor has no {', '.join(missing)}")
    in_advance = PREBUILT / prebuilt_name(SOURCES, chosen)
    if in_advance.exists():
        return str(in_advance)
    library = build_library(folder, (*chosen.cpu, "-O1"))  # less optimised: a third of the time to build
    if library is None:
        pytest.skip("no C++ compiler works here")
    return str(library)


def put_iq1_m_scales(blocks: np.ndarray, scales: np.ndarray) -> None:
    """Write d, whose four nibbles iq1_m keeps in the highest bits of four words: [N, 56] uint8, [N] uint16."""
    for index in range(4):
        place = blocks[:, 49 + 2 * index]
        place[:] = place & 15 | ((scales >> 4 * index & 15) << 4).astype(np.uint8)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix as a file has it.

    Attributes:
        rows: [O, W] uint8.
        scale: of the whole tensor.
        dense: [O, I] float32, by the format's definition, which is tested against libggml bit by bit.
    """

    format: str
    rows: Tensor
    scale: float
    dense: Tensor

    def packing(self, library: str) -> KernelPacking:
        return KernelPacking(self.format, *self.dense.shape, library)

    def packed(self, library: str) -> Tensor:
        return self.packing(library).pack(self.rows, self.scale)


def stored_matrix(
    name: str, rows: int, columns: int, seed: int = 0, is_tame: bool = True, byte: int | None = None
) -> StoredMatrix:
    """Return random bytes as a matrix.

    Args:
        name: of the format.
        rows, columns: O and I.
        seed: of the bytes.
        is_tame: scales of about 0.01 to 0.03, so that sums mean something; else any finite ones, of both signs.
        byte: what all others are, not random.
    """
    one = FORMATS[name]
    rng = np.random.default_rng([*name.encode(), rows, columns, seed])
    blocks = rng.integers(0, 256, (rows * columns // one.block_elements, one.block_nbytes), dtype=np.uint8)
    if byte is not None:
        blocks[:] = byte
    for start in FLOAT16_FIELDS[name]:
        centre = -CENTRES.get(name, -1) if start else 1
        bits = (rng.uniform(0.01, 0.03, len(blocks)) * centre).astype("<f2").view("<u2")
        if not is_tame:
            bits = rng.integers(0, 0x7C00, len(blocks), dtype="<u2") | rng.choice(SIGNS, len(blocks))
        blocks[:, start : start + 2] = bits.view(np.uint8).reshape(-1, 2)
    if name == "iq1_m":
        tame = rng.uniform(0.01, 0.03, len(blocks)).astype("<f2").view("<u2")
        finite = rng.integers(0, 0x7C00, len(blocks), dtype="<u2") | rng.choice(SIGNS, len(blocks))
        put_iq1_m_scales(blocks, tame if is_tame else finite)
    if name == "mxfp4":
        blocks[:, 0] = rng.integers(118, 124, len(blocks)) if is_tame else rng.integers(0, 255, len(blocks))
    if name == "nvfp4":
        blocks[:, :4] = rng.integers(20, 60, (len(blocks), 4)) if is_tame else rng.integers(0, 0x7F, (len(blocks), 4))
    if name in FOLDER_FORMATS:
        put_scales(name, blocks, rng, is_tame)
    scale = 0.375 if name == "i2_s" else 1.0
    raw = one.join_rows(torch.from_numpy(blocks.reshape(rows, -1)), scale)
    return StoredMatrix(name, *one.split_rows(raw, (rows, columns)), one.dequantize(raw, (rows, columns)))


def golden_matrix(name: str) -> StoredMatrix:
    """Return libggml's golden blocks as a matrix of sixteen rows; their weights are libggml's own, or numpy's."""
    if name in FOLDER_FORMATS:
        blocks = folder_blocks(name, 64)
        dense = torch.from_numpy(folder_weights(name, blocks).reshape(16, -1))
        return StoredMatrix(name, torch.from_numpy(blocks.reshape(16, -1)), 1.0, dense)
    if name == "i2_s":
        stored = np.load(GOLDEN / "i2s.npz")
        rows, scale = FORMATS[name].split_rows(torch.from_numpy(stored["i2s_x86_raw"]), stored["dequant"].shape)
        return StoredMatrix(name, rows, scale, torch.from_numpy(stored["dequant"]))
    stored = np.load(GOLDEN / "ggml_blocks.npz")
    rows, dense = stored[f"{name.upper()}.raw"], stored[f"{name.upper()}.f32"]
    return StoredMatrix(name, torch.from_numpy(rows.reshape(16, -1)), 1.0, torch.from_numpy(dense.reshape(16, -1)))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the root of the mean squared difference over that of the expected values."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def num_differing(found: Tensor, expected: Tensor) -> int:
    """Return how many elements differ in any bit; two NaNs are equal."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    integer = {2: torch.int16, 4: torch.int32}[found.itemsize]
    same = found.contiguous().view(integer) == expected.contiguous().view(integer)
    return int((~(same | (found.isnan() & expected.isnan()))).sum())
