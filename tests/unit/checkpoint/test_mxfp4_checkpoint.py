"""Blocks and scales as one tensor: ggml's own bytes, names, sizes, and pairs that do not fit together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from safetensors_bytes import write_index

from graphcore.checkpoint.mxfp4_checkpoint import Mxfp4Checkpoint, ggml_bytes
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint, load_tensors
from graphcore.errors import CheckpointError
from graphcore.quant import FORMATS

GOLDEN = Path(__file__).parents[2] / "golden" / "mxfp4_hf.npz"
NAME = "model.layers.0.mlp.experts.down_proj"


def golden(name: str) -> torch.Tensor:
    return torch.from_numpy(np.load(GOLDEN)[name])


def save(folder: Path, **changes: torch.Tensor) -> Path:
    tensors = {"blocks": golden("blocks"), "scales": golden("scales"), "bias": torch.ones(2, 8), **changes}
    save_file({f"{NAME}_{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_bytes_are_those_of_ggml() -> None:
    assert torch.equal(ggml_bytes(golden("blocks"), golden("scales")), golden("ggml_raw").flatten())


def test_every_code_lands_at_its_element() -> None:
    blocks = torch.randint(0, 256, (3, 4, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    raw = ggml_bytes(blocks, torch.full((3, 4, 5), 127, dtype=torch.uint8)).view(3, 4, 5, 17)
    for element in range(32):
        code = (blocks[..., element // 2] >> (4 * (element % 2))) & 15
        assert torch.equal((raw[..., 1 + element % 16] >> (4 * (element // 16))) & 15, code), element


def test_a_pair_is_one_mxfp4_tensor_with_transformers_values(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path))
    assert checkpoint.tensors.keys() == {f"{NAME}_blocks", f"{NAME}_bias"}
    info = checkpoint.tensors[f"{NAME}_blocks"]
    assert (info.encoding, info.shape, info.nbytes) == ("mxfp4", (2, 8, 96), 2 * 8 * 3 * 17)
    raw = checkpoint.read(info.name)
    assert (raw.dtype, raw.shape) == (torch.uint8, (info.nbytes,))
    dense = FORMATS["mxfp4"].dequantize(raw, info.shape)
    assert torch.equal(dense, golden("values_f32_HF_transposed").mT)  # which transformers returns by input row
    assert torch.equal(checkpoint.read(f"{NAME}_bias"), torch.ones(2, 8))


def test_blocks_and_scales_may_lie_in_different_shards(tmp_path: Path) -> None:
    weight_map = {}
    for part in ("blocks", "scales"):
        save_file({f"{NAME}_{part}": golden(part)}, tmp_path / f"{part}.safetensors")
        weight_map[f"{NAME}_{part}"] = f"{part}.safetensors"
    write_index(tmp_path, weight_map)
    assert torch.equal(open_checkpoint(tmp_path).read(f"{NAME}_blocks"), golden("ggml_raw").flatten())


def test_a_checkpoint_without_pairs_is_read_as_it_is(tmp_path: Path) -> None:
    save_file({"a_blocks": torch.ones(2, 4), "b_scales": torch.ones(3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert type(checkpoint) is SafetensorsCheckpoint
    assert checkpoint.tensors.keys() == {"a_blocks", "b_scales"}


def test_tensors_that_are_loaded_one_by_one_stay_as_the_file_has_them(tmp_path: Path) -> None:
    tensors = load_tensors(save(tmp_path), torch.bfloat16)
    assert torch.equal(tensors[f"{NAME}_blocks"], golden("blocks"))
    assert torch.equal(tensors[f"{NAME}_scales"], golden("scales"))


@pytest.mark.parametrize(
    "changes",
    [
        {"scales": torch.zeros(2, 8, 2, dtype=torch.uint8)},
        {"scales": torch.zeros(2, 8, 3)},
        {"blocks": torch.zeros(2, 8, 3, 8, dtype=torch.uint8)},
        {"blocks": torch.zeros(3, 16, dtype=torch.uint8), "scales": torch.zeros(3, dtype=torch.uint8)},
    ],
)
def test_pairs_that_do_not_fit_are_refused_by_both_names(tmp_path: Path, changes: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CheckpointError, match=rf"'{NAME}_blocks' .* and '{NAME}_scales' .* no MXFP4 blocks and scales"):
        open_checkpoint(save(tmp_path, **changes))


def test_a_missing_tensor_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    checkpoint = Mxfp4Checkpoint(save(tmp_path))
    with pytest.raises(CheckpointError, match=f"has no tensor '{NAME}_scales'"):
        checkpoint.read(f"{NAME}_scales")
