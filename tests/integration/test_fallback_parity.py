"""model.fallback=transformers against transformers itself, the same class with the same attention implementation.

float32 on the CPU, and the same operations in the same order: what is compared must be equal to the bit, except where
rows are padded, which changes the shape of products (1e-5 then; logits are of order one).
"""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from support.fallback_models import ALONE, CASES, ISSUE, NEW_TOKENS, FallbackModel, save_fallback
from support.queues import Paced

from graphcore import Engine

pytestmark = pytest.mark.thorough

PADDED_TOLERANCE = 1e-5
FINAL_NORMS = (
    "model.norm",
    "model.embedding_norm",
    "gpt_neox.final_layer_norm",
    "transformer.ln_f",
    "model.decoder.final_layer_norm",
)
SIZES = ["context_length=128", "batch_size=3"]


@pytest.fixture(scope="module")
def fallback_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], FallbackModel]:
    """A function from a name in `fallback_models.CONFIGS` and an attention implementation to the checkpoint."""

    @cache
    def make(name: str, attention: str) -> FallbackModel:
        return save_fallback(name, tmp_path_factory.mktemp(name), attention)

    return make


def load(model: FallbackModel, *overrides: str, **groups: str) -> Engine:
    chosen = ["model.fallback=transformers", f"model.attention={model.attention}", *SIZES]
    return Engine.load(model.folder, device="cpu", overrides=[*chosen, *overrides], **{"dtype": "fp32", **groups})


@pytest.fixture(params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest, fallback_model: Callable[[str, str], FallbackModel]) -> FallbackModel:
    return fallback_model(*request.param)


@pytest.fixture
def engine(model: FallbackModel) -> Iterator[Engine]:
    with load(model) as loaded:
        yield loaded


def test_logits_are_those_of_transformers(model: FallbackModel, engine: Engine) -> None:
    assert torch.equal(engine.logits(model.ids), model.outputs().logits)


def test_hidden_states_are_those_of_transformers(model: FallbackModel, engine: Engine) -> None:
    _, layers = engine.logits(model.ids, output_hidden_states=True)
    expected = model.outputs(output_hidden_states=True).hidden_states
    assert len(layers) == len(expected) == model.reference.config.num_hidden_layers + 1
    for ours, theirs in zip(layers[:-1], expected[:-1], strict=True):
        assert torch.equal(ours, theirs)
    # transformers' last one is after the final norm, ours is the residual stream before it
    (norm,) = [module for name, module in model.reference.named_modules() if name in FINAL_NORMS]
    with torch.no_grad():
        assert torch.equal(norm(layers[-1]), expected[-1])


def test_greedy_tokens_are_those_of_transformers(model: FallbackModel, engine: Engine) -> None:
    made = engine.generate(model.ids.tolist(), max_new_tokens=NEW_TOKENS)
    assert [list(one.token_ids) for one in made] == model.greedy()


def test_a_row_of_a_batch_with_other_lengths_is_the_row_alone(model: FallbackModel, engine: Engine) -> None:
    rows = model.other_ids
    together = engine.generate(rows, max_new_tokens=12, logprobs=True)
    for row, one in zip(rows, together, strict=True):
        alone = engine.generate([row], max_new_tokens=12, logprobs=True)[0]
        assert one.token_ids == alone.token_ids
        assert one.logprobs == pytest.approx(alone.logprobs, abs=PADDED_TOLERANCE)


@pytest.mark.parametrize("name", ISSUE)
def test_attention_weights_are_those_of_transformers(
    name: str, fallback_model: Callable[[str, str], FallbackModel]
) -> None:
    model = fallback_model(name, "eager")
    with load(model) as engine:
        _, weights = engine.logits(model.ids, output_attentions=True)
        expected = model.outputs(output_attentions=True).attentions
        assert len(weights) == 3
        for ours, theirs in zip(weights, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ISSUE)
def test_forward_runs_hidden_states_through_all_layers(
    name: str, fallback_model: Callable[[str, str], FallbackModel]
) -> None:
    model = fallback_model(name, "eager")
    with load(model) as engine:
        _, (first, *_, last) = engine.logits(model.ids, output_hidden_states=True)
        assert torch.equal(engine.forward(first), last)
        assert not torch.equal(engine.forward(first * 0.5), last)


@pytest.mark.parametrize("name", ISSUE)
def test_a_prompt_in_chunks_is_the_prompt_in_one(
    name: str, fallback_model: Callable[[str, str], FallbackModel]
) -> None:
    model = fallback_model(name, "eager")
    with load(model, "prefill_chunk=16") as engine:
        torch.testing.assert_close(engine.logits(model.ids), model.outputs().logits, atol=1e-5, rtol=0)
        made = engine.generate(model.ids.tolist(), max_new_tokens=8)
        assert [list(one.token_ids) for one in made] == [row[:8] for row in model.greedy()]


@pytest.mark.parametrize("name", ALONE)
def test_a_prompt_that_chunks_would_change_runs_whole(
    name: str, fallback_model: Callable[[str, str], FallbackModel]
) -> None:
    model = fallback_model(name, "eager")
    with load(model, "prefill_chunk=16") as engine:
        assert torch.equal(engine.logits(model.ids), model.outputs().logits)
        assert any(note.startswith("prompts run whole, and one by one") for note in engine.notes)


def test_stream_and_sampling_give_what_generate_gives(fallback_model: Callable[[str, str], FallbackModel]) -> None:
    model = fallback_model("stablelm", "sdpa")
    prompt = model.ids[0].tolist()
    with load(model) as engine:
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
        whole = engine.generate([prompt], max_new_tokens=10, **sampled)[0].token_ids
        assert [event.token_id for event in engine.stream(prompt, max_new_tokens=10, **sampled)] == list(whole)
        other = engine.generate([prompt], max_new_tokens=10, temperature=0.8, top_p=0.9, seed=4)[0].token_ids
        assert whole != other


def test_a_sequence_ends_where_the_context_is_full(fallback_model: Callable[[str, str], FallbackModel]) -> None:
    model = fallback_model("opt", "eager")
    rows = [model.ids[0, :40].tolist(), model.ids[1, :4].tolist()]  # a table of positions would end in IndexError
    with load(model, "context_length=48") as engine:
        long, short = engine.generate(rows, max_new_tokens=30)
        assert (long.finish_reason, len(long.token_ids)) == ("context", 9)
        assert (short.finish_reason, len(short.token_ids)) == ("length", 30)
        assert short.token_ids == engine.generate([rows[1]], max_new_tokens=30)[0].token_ids


def test_a_16_bit_model_is_transformers_own_16_bit_model(
    fallback_model: Callable[[str, str], FallbackModel],
) -> None:
    from transformers import AutoModelForCausalLM

    model = fallback_model("granite", "sdpa")
    reference = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    with load(model, dtype="bf16") as engine, torch.no_grad():
        assert torch.equal(engine.logits(model.ids), reference(model.ids, use_cache=False).logits.float())
        assert engine.stats["dtype"] == "bfloat16"


def test_one_of_graphcores_own_architectures_runs_through_transformers_too(
    load_tiny: Callable[[str, str], Engine], tiny_model: Callable[[str], object]
) -> None:
    tiny = tiny_model("qwen3")
    overrides = ["model.fallback=transformers", "model.attention=eager", "context_length=128"]
    with Engine.load(tiny.folder, dtype="fp32", device="cpu", overrides=overrides) as engine:
        assert torch.equal(engine.logits(tiny.ids[:1]), tiny.logits_of(tiny.ids[:1]))


def test_closing_ends_a_generation_that_is_under_way(fallback_model: Callable[[str, str], FallbackModel]) -> None:
    from graphcore.errors import ConfigError

    model = fallback_model("phi3", "sdpa")
    engine = load(model)
    events = Paced(engine, model.ids[0].tolist(), 10)
    next(events)
    events.close_engine()
    with pytest.raises(ConfigError, match="closed"):
        list(events)


def test_a_model_that_cannot_leave_padding_out_runs_prompts_of_one_length_together(
    fallback_model: Callable[[str, str], FallbackModel],
) -> None:
    model = fallback_model("phi3", "sdpa")
    prompts = [[5, 6, 7], [8, 9, 10], [11], [12, 13, 14]]
    with load(model) as engine:
        alone = [engine.generate(prompt, max_new_tokens=5)[0].token_ids for prompt in prompts]
        cached = engine.runner.cached  # type: ignore[attr-defined]
        cached.takes = cached.takes - {"attention_mask"}
        together = engine.generate(prompts, max_new_tokens=5)
        assert [answer.token_ids for answer in together] == alone
        assert [answer.timings.batch for answer in together] == [2, 2, 1, 1]
