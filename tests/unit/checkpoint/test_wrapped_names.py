"""Names that training programs' wrappers leave in files, against the modules that torch itself wraps."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint, unwrapped_names
from graphcore.errors import CheckpointError

PLAIN = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "_orig_mod.", "base_model.model.", "module._orig_mod.", "_orig_mod.module.", "module.module."],
)
def test_a_prefix_of_all_names_is_taken_off(prefix: str) -> None:
    assert list(unwrapped_names([prefix + name for name in PLAIN], "x").values()) == PLAIN


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_torch_s_wrappers_of_single_layers_are_taken_off(wrapper: str) -> None:
    stored = [name.replace("layers.0.", f"layers.0.{wrapper}.") for name in PLAIN]
    assert list(unwrapped_names(stored, "x").values()) == PLAIN


def test_compiled_modules_have_the_names_that_are_taken_off() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[1] = torch.compile(inner[1])
    stored = torch.compile(inner).state_dict()
    assert any("_orig_mod" in name for name in stored)
    assert set(unwrapped_names(stored, "x").values()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_prefix_of_some_names_stays_and_a_counter_beside_the_model_does_not_count() -> None:
    mixed = [f"module.{PLAIN[0]}", *PLAIN[1:]]
    assert list(unwrapped_names(mixed, "x").values()) == mixed
    assert list(unwrapped_names(["step", *(f"module.{name}" for name in PLAIN)], "x").values()) == ["step", *PLAIN]


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"are both 'a\.weight' without the names of wrappers"):
        unwrapped_names(["a.weight", "a._orig_mod.weight"], "x")


def test_a_file_is_read_under_the_plain_names_with_a_note(tmp_path) -> None:
    save_file({f"module.{name}": torch.full((2,), float(index)) for index, name in enumerate(PLAIN)}, tmp_path / "x")
    checkpoint = SafetensorsCheckpoint(tmp_path / "x")
    assert {name: checkpoint.read(name)[0].item() for name in PLAIN} == {PLAIN[0]: 0.0, PLAIN[1]: 1.0, PLAIN[2]: 2.0}
    assert checkpoint.notes == ("names of wrappers were taken off tensors' names, as in 'module.lm_head.weight'",)
    save_file({name: torch.zeros(2) for name in PLAIN}, tmp_path / "y")
    assert SafetensorsCheckpoint(tmp_path / "y").notes == ()
