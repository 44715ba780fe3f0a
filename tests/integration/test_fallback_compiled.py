"""model.fallback=transformers graph=compiled: the answers of transformers, and streamed weights give the resident bits.

float32 on the CPU. Compiled products and sums have another order: 2e-5, of logits of order one.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from support.fallback_models import ALONE, CONFIGS, ISSUE, MORE, WITHOUT_SDPA, FallbackModel, save_fallback
from torch import Tensor

from graphcore import Engine, ForwardState

pytestmark = pytest.mark.thorough

TOLERANCE = 2e-5
QUICKEST = "olmo2"
SIZES = ("context_length=128", "batch_size=3", "model.fallback=transformers", "graph=compiled")
STREAMED = ("streaming.memory_budget=64MB",)


@pytest.fixture(scope="module")
def fallback_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FallbackModel]:
    @cache
    def make(name: str) -> FallbackModel:
        attention = "eager" if name in WITHOUT_SDPA else "sdpa"
        return save_fallback(name, tmp_path_factory.mktemp(name), attention, vocab_size=1280)

    return make


def load(model: FallbackModel, *overrides: str, streaming: str = "off") -> Engine:
    keys = [*SIZES, f"model.attention={model.attention}", *overrides]
    return Engine.load(model.folder, dtype="fp32", device="cpu", streaming=streaming, overrides=keys)


def decoded(engine: Engine, ids: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Return the logits of decode steps, and 40 greedy tokens of each row."""
    made = engine.generate(ids.tolist(), max_new_tokens=40)
    logits = engine.logits(ids, by_token=True)
    assert isinstance(logits, Tensor)
    return logits, [list(one.token_ids) for one in made]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == QUICKEST else pytest.mark.slow) for name in (*ISSUE, *MORE)],
)
def test_decode_steps_are_those_of_transformers_and_streamed_ones_the_same_to_the_bit(
    name: str, fallback_model: Callable[[str], FallbackModel]
) -> None:
    model = fallback_model(name)
    with load(model) as engine:
        assert (engine.stats["graph"], engine.stats["prefill"]) == ("compiled", "eager")
        logits, tokens = decoded(engine, model.ids)
        graphs = engine.stats["compiled_graphs"]
    assert tokens == model.greedy()
    if name != "phi3_long":  # whose rotary factors are those of the longest pass
        torch.testing.assert_close(logits, model.outputs().logits, atol=TOLERANCE, rtol=0)  # type: ignore[attr-defined]
    kinds = 1 if name in ("gemma2", "lfm2") else 0
    assert 1 <= graphs <= 2 * (1 + kinds)  # for one row and, where rows run together, for two
    with load(model, *STREAMED, streaming="on") as engine:
        assert engine.plan.is_streaming
        streamed, same = decoded(engine, model.ids)
    assert torch.equal(streamed, logits)
    assert same == tokens


def test_rows_of_other_lengths_give_the_rows_alone(fallback_model: Callable[[str], FallbackModel]) -> None:
    model = fallback_model(QUICKEST)
    rows = model.other_ids
    with load(model) as engine:
        together = engine.generate(rows, max_new_tokens=12, logprobs=True)
        for row, one in zip(rows, together, strict=True):
            alone = engine.generate([row], max_new_tokens=12, logprobs=True)[0]
            assert one.token_ids == alone.token_ids
            assert one.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)


def test_nothing_is_compiled_after_the_first_step_of_a_width(fallback_model: Callable[[str], FallbackModel]) -> None:
    """Lengths from 2 to 127 pass every size of the model, 16, 64 and 112, and the end of a memory of 64 tokens."""
    model = fallback_model(QUICKEST)
    with load(model) as engine:
        for prompt in ([5], model.ids[0, :20].tolist()):
            engine.generate([prompt], max_new_tokens=127 - len(prompt))
            assert engine.stats["compiled_graphs"] == 1


def test_forward_of_one_token_compiles_beside_what_it_replaces(fallback_model: Callable[[str], FallbackModel]) -> None:
    model = fallback_model(QUICKEST)
    with load(model) as engine:
        _, (first, *_, last) = engine.logits(model.ids, output_hidden_states=True)
        state = ForwardState()
        engine.forward(first[:, :-1], state)
        found = engine.forward(first[:, -1:], state)
    torch.testing.assert_close(found, last[:, -1:], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_layers_whose_cache_is_no_keys_and_values_run_eager_beside_compiled_ones(
    fallback_model: Callable[[str], FallbackModel],
) -> None:
    model = fallback_model("lfm2")
    assert "lfm2" in ALONE
    assert CONFIGS["lfm2"]["full_attn_idxs"] == [1]
    with load(model) as engine:
        (line,) = [note for note in engine.notes if "not compiled" in note]
        assert line.startswith("Lfm2DecoderLayer runs eager, not compiled: its cache (LinearAttentionLayer) holds more")
        assert engine.stats["graph"] == "compiled"
