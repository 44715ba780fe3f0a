"""Golden bytes, and byte strings no quantiser would write, for every stored weight encoding.

Golden values were computed by libggml (`ggml_get_type_traits(type)->to_float`) and, for i2_s, by the packer of
microsoft/BitNet; see tests/golden.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphcore.quant import FORMATS
from support import packed_matrices
from support.packed_matrices import FOLDER_FORMATS, folder_blocks, folder_weights, put_iq1_m_scales

GOLDEN = Path(__file__).parents[1] / "golden"

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Those of formats without a kernel, too, which packed_matrices.py does not have:
FLOAT16_FIELDS = {**packed_matrices.FLOAT16_FIELDS, "tq1_0": (52,), "f32": (), "f16": (0,), "bf16": ()}

# Zeros, smallest and largest subnormals, smallest normal, largest, infinities, NaNs, of both signs.
HARD_FLOAT16 = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01],
    dtype="<u2",
)


@dataclass(frozen=True)
class GoldenBlocks:
    """Blocks of one format and the weights they stand for: [N, W] uint8, [N, E] float32."""

    blocks: Bytes
    weights: Floats
    tail: Bytes  # what follows the last block of a tensor; empty for all but i2_s

    def tensor(self, num_blocks: int) -> tuple[Bytes, Floats]:
        """Return the bytes and the weights of a tensor of that many blocks, the golden ones over and over."""
        rows = np.arange(num_blocks) % len(self.blocks)
        return np.concatenate((self.blocks[rows].reshape(-1), self.tail)), self.weights[rows]


@cache
def load_golden(name: str) -> GoldenBlocks:
    if name == "i2_s":
        stored = np.load(GOLDEN / "i2s.npz")
        raw, weights = stored["i2s_x86_raw"], stored["dequant"]
        return GoldenBlocks(raw[:-32].reshape(-1, 32), weights.reshape(-1, 128), raw[-32:])
    if name in FOLDER_FORMATS:
        blocks = folder_blocks(name, 64)
        return GoldenBlocks(blocks, folder_weights(name, blocks), np.empty(0, np.uint8))
    stored = np.load(GOLDEN / "ggml_blocks.npz")
    assert f"{name.upper()}.raw" in stored, f"tests/golden/ggml_blocks.npz has no data for the new format {name}"
    return GoldenBlocks(stored[f"{name.upper()}.raw"], stored[f"{name.upper()}.f32"], np.empty(0, np.uint8))


def random_blocks(name: str, num_blocks: int) -> Bytes:
    """Return seeded random blocks; the first quarter has zero, subnormal, infinite and NaN scales."""
    rng = np.random.default_rng([*name.encode(), num_blocks])
    blocks = rng.integers(0, 256, (num_blocks, FORMATS[name].block_nbytes), dtype=np.uint8)
    for start in FLOAT16_FIELDS[name]:
        hard = rng.choice(HARD_FLOAT16, num_blocks // 4)
        blocks[: num_blocks // 4, start : start + 2] = hard.view(np.uint8).reshape(-1, 2)
    if name == "iq1_m":
        put_iq1_m_scales(blocks[: num_blocks // 4], rng.choice(HARD_FLOAT16, num_blocks // 4))
    return blocks
