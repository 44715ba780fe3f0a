"""Every architecture once, in seconds: whoever has a GPU for a minute learns here what does not run at all."""

import pytest
import torch
from support.comparisons import largest_error
from support.tiny_models import ARCHITECTURES, TinyModel

from graphcore import Engine

TOLERANCE = 1e-4  # float32 against transformers on the CPU; logits are of order one


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_eager_logits_are_those_of_transformers(name: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    engine: Engine = load_on(tiny.folder, graph="eager")
    found = engine.logits(tiny.ids)
    assert isinstance(found, torch.Tensor)
    assert largest_error(found, tiny.logits) < TOLERANCE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_captured_step_runs_and_is_finite(name: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    engine: Engine = load_on(tiny.folder, graph="captured")
    assert engine.stats["graph"] == "captured"
    (one,) = engine.generate([tiny.ids[0, :9].tolist()], max_new_tokens=12, ignore_eos=True)
    assert len(one.token_ids) == 12


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_packed_weights_run_captured(quant: str, dtype: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model("llama3")
    engine: Engine = load_on(tiny.folder, graph="captured", dtype=dtype, quant=quant)
    (one,) = engine.generate([tiny.ids[0, :9].tolist()], max_new_tokens=12, ignore_eos=True)
    assert len(one.token_ids) == 12
