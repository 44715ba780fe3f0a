"""transformers' own classes on a GPU: model.fallback=transformers, with each way that they compute attention.

Float32 logits are compared with transformers on the CPU, bf16 ones with what bf16 costs at all: transformers' own bf16
logits on the same device, with eager attention, against float32, doubled.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from support.comparisons import largest_error
from support.fallback_models import ISSUE, WITHOUT_SDPA, FallbackModel, save_fallback

from graphcore import Engine
from graphcore.errors import ConfigError

FLOAT32 = 1e-4  # logits are of order one; a GPU sums in another order
HALF_FACTOR = 2.0
FLASH = ("phi3", "olmo2")  # whose heads flash attention takes: 16 wide, without added biases
HAS_FLASH = find_spec("flash_attn") is not None
SIZES = ("context_length=128", "batch_size=3")

Models = Callable[[str], FallbackModel]


@pytest.fixture(scope="module")
def fallback_model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A function from a name in `fallback_models.CONFIGS` to the checkpoint; its reference is eager, on the CPU."""

    @cache
    def make(name: str) -> FallbackModel:
        return save_fallback(name, tmp_path_factory.mktemp(name), "eager")

    return make


def load(model: FallbackModel, attention: str, dtype: str, *overrides: str) -> Engine:
    chosen = ["model.fallback=transformers", f"model.attention={attention}", *SIZES, *overrides]
    return Engine.load(model.folder, device="cuda:0", dtype=dtype, overrides=chosen)


def logits_of(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    found = engine.logits(ids)
    assert isinstance(found, torch.Tensor)
    return found.cpu()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ISSUE)
def test_logits_are_those_of_transformers(name: str, attention: str, fallback_model: Models) -> None:
    if attention == "sdpa" and name in WITHOUT_SDPA:
        pytest.skip(f"transformers has no sdpa for {name}")
    model = fallback_model(name)
    with load(model, attention, "fp32") as engine:
        assert largest_error(logits_of(engine, model.ids), model.outputs().logits) < FLOAT32


@pytest.mark.parametrize("name", ISSUE)
def test_streamed_layers_are_the_resident_ones_to_the_bit(name: str, fallback_model: Models) -> None:
    model = fallback_model(name)
    prompt = model.ids[0, :20].tolist()
    found = []
    for streaming in ("off", "on"):
        with load(model, "auto", "fp32", f"streaming={streaming}") as engine:
            assert engine.plan.is_streaming == (streaming == "on")
            tokens = engine.generate([prompt], max_new_tokens=24, ignore_eos=True)[0].token_ids
            found.append((logits_of(engine, model.ids), tokens))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("name", FLASH)
def test_bf16_logits_differ_by_no_more_than_bf16_costs(name: str, attention: str, fallback_model: Models) -> None:
    if attention == "flash_attention_2" and not HAS_FLASH:
        pytest.skip("flash_attn is not installed")
    model = fallback_model(name)
    expected = model.outputs().logits
    with load(model, "eager", "bf16") as engine:
        allowed = HALF_FACTOR * largest_error(logits_of(engine, model.ids), expected)
    with load(model, attention, "bf16") as engine:
        assert largest_error(logits_of(engine, model.ids), expected) < allowed


@pytest.mark.skipif(HAS_FLASH, reason="flash_attn is installed")
def test_flash_attention_that_is_not_installed_is_refused_with_the_way_out(fallback_model: Models) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention=flash_attention_2 is not possible .*use model\.attention"):
        load(fallback_model("phi3"), "flash_attention_2", "bf16")


def test_flash_attention_in_float32_is_refused(fallback_model: Models) -> None:
    with pytest.raises(ConfigError, match="computes in 16 bits"):
        load(fallback_model("phi3"), "flash_attention_2", "fp32")
