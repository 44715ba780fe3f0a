"""Experts that a file holds one by one, presented as one tensor for each projection."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from graphcore.checkpoint.file_bytes import read_span
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.stacked_checkpoint import with_stacked_experts
from graphcore.errors import CheckpointError

EXPERTS = 12  # more than ten: experts are in the order of their numbers, not of their names


def stored_by(folder: Path, changes: dict[str, Tensor | None] | None = None) -> tuple[Path, dict[str, Tensor]]:
    """Write a checkpoint of two layers, with changes: a tensor instead of another, or none."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{layer}.mlp.experts.{expert}.{part}.weight": torch.randn(*shape, generator=generator)
        for expert in range(EXPERTS)
        for layer in range(2)
        for part, shape in (("up_proj", (5, 3)), ("down_proj", (3, 5)))
    }
    tensors |= {"layers.0.mlp.gate.weight": torch.randn(EXPERTS, 3), **(changes or {})}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return folder, kept


def test_experts_are_stacked_in_the_order_of_their_numbers_and_others_stay(tmp_path: Path) -> None:
    folder, stored = stored_by(tmp_path)
    checkpoint = with_stacked_experts(open_checkpoint(folder))
    assert sorted(checkpoint.tensors) == sorted(
        ["layers.0.mlp.gate.weight"]
        + [f"layers.{layer}.mlp.experts.{part}.weight" for layer in range(2) for part in ("up_proj", "down_proj")]
    )
    name = "layers.1.mlp.experts.up_proj.weight"
    expected = torch.stack([stored[f"layers.1.mlp.experts.{expert}.up_proj.weight"] for expert in range(EXPERTS)])
    assert checkpoint.tensors[name].shape == (EXPERTS, 5, 3)
    assert torch.equal(checkpoint.read(name), expected)
    assert torch.equal(checkpoint.read("layers.0.mlp.gate.weight"), stored["layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("expert", [0, 2, 10, 11])
def test_one_expert_is_read_from_its_own_place(expert: int, tmp_path: Path) -> None:
    folder, stored = stored_by(tmp_path)
    checkpoint = with_stacked_experts(open_checkpoint(folder))
    (span,) = checkpoint.matrix_spans("layers.0.mlp.experts.down_proj.weight", expert)
    raw = read_span(span, checkpoint.files[span.file], "an expert")
    expected = stored[f"layers.0.mlp.experts.{expert}.down_proj.weight"]
    assert torch.equal(raw.view(torch.float32).view(3, 5), expected)


def test_one_matrix_of_a_tensor_of_all_is_a_part_of_it(tmp_path: Path) -> None:
    together = torch.randn(4, 5, 3)
    save_file({"experts": together}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    (span,) = checkpoint.matrix_spans("experts", 2)
    raw = read_span(span, checkpoint.files[span.file], "an expert")
    assert torch.equal(raw.view(torch.float32).view(5, 3), together[2])


def test_a_checkpoint_without_such_experts_is_left_as_it_is(tmp_path: Path) -> None:
    save_file(
        {"a.experts.gate_up_proj": torch.zeros(4, 5, 3), "b.2.weight": torch.zeros(2)}, tmp_path / "x.safetensors"
    )
    checkpoint = open_checkpoint(tmp_path)
    assert with_stacked_experts(checkpoint) is checkpoint


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    name = "layers.1.mlp.experts.3.up_proj.weight"
    folder, _ = stored_by(tmp_path, {name: None})
    with pytest.raises(CheckpointError, match=f"Missing required tensor: '{name}'"):
        with_stacked_experts(open_checkpoint(folder))


@pytest.mark.parametrize(
    "other", [torch.zeros(6, 3), torch.zeros(5, 3).half(), torch.zeros(15)], ids=["shape", "dtype", "dims"]
)
def test_an_expert_unlike_the_others_is_named(other: Tensor, tmp_path: Path) -> None:
    name = "layers.0.mlp.experts.7.up_proj.weight"
    folder, _ = stored_by(tmp_path, {name: other})
    with pytest.raises(CheckpointError, match=f"'{name}'.* does not fit"):
        with_stacked_experts(open_checkpoint(folder))
