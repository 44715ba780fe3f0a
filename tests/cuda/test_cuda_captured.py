"""A captured decode step is the eager one: logits within a tolerance, 256 greedy tokens, one sequence and three.

Tolerances: in float32 both sum the same products in another order, and logits are of order one. In half precision they
may differ by what the dtype costs at all: the eager error against transformers in float32, doubled.
"""

from collections.abc import Sequence

import pytest
import torch
from agreement import assert_same_tokens, largest_error, step_logits
from tiny_models import ARCHITECTURES, TinyModel

NEW_TOKENS = 256
PROMPT = 20
FLOAT32 = 1e-4
HALF_FACTOR = 2.0


def prompts_of(tiny: TinyModel) -> list[list[int]]:
    """Return three prompts of different lengths."""
    return [tiny.ids[0, :PROMPT].tolist(), tiny.ids[1, :7].tolist(), tiny.ids[1, 3:30].tolist()]


def rows_of(tiny: TinyModel) -> Sequence[Sequence[int]]:
    return [*tiny.ids.tolist(), tiny.ids[0].flip(0).tolist()]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_token_by_token_are_the_eager_ones(name: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    eager, captured = load_on(tiny.folder, graph="eager"), load_on(tiny.folder, graph="captured")
    for batch in (1, 3):
        rows = rows_of(tiny)[:batch]
        found = step_logits(captured, rows, PROMPT)
        assert largest_error(found, step_logits(eager, rows, PROMPT)) < FLOAT32
        expected = tiny.logits[: min(batch, 2), PROMPT - 1 :]
        assert largest_error(found[: len(expected)], expected) < FLOAT32


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bf16_logits_differ_by_no_more_than_bf16_costs(name: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    rows, expected = tiny.ids.tolist(), tiny.logits[:, PROMPT - 1 :]
    eager = step_logits(load_on(tiny.folder, graph="eager", dtype="bf16"), rows, PROMPT)
    captured = step_logits(load_on(tiny.folder, graph="captured", dtype="bf16"), rows, PROMPT)
    allowed = HALF_FACTOR * largest_error(eager, expected)
    assert largest_error(captured, expected) < allowed
    assert largest_error(captured, eager) < allowed


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_256_greedy_tokens_are_the_eager_ones_alone_and_in_a_batch(name: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    prompts = prompts_of(tiny)
    eager, captured = load_on(tiny.folder, graph="eager"), load_on(tiny.folder, graph="captured")
    for batch in (prompts[:1], prompts):
        expected = eager.generate(batch, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        found = captured.generate(batch, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for one, other, prompt in zip(found, expected, batch, strict=True):
            assert_same_tokens(one.token_ids, other.token_ids, prompt, eager, FLOAT32)


def test_a_graph_survives_other_generations_between_its_replays(tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model("gemma3")  # whose rings wrap
    prompts = prompts_of(tiny)
    engine = load_on(tiny.folder, graph="captured")
    alone = [engine.generate([prompt], max_new_tokens=40, ignore_eos=True)[0].token_ids for prompt in prompts]
    together = [one.token_ids for one in engine.generate(prompts, max_new_tokens=40, ignore_eos=True)]
    engine.logits(tiny.ids)
    list(engine.stream(prompts[1], max_new_tokens=9, temperature=1.0, seed=2))
    again = [engine.generate([prompt], max_new_tokens=40, ignore_eos=True)[0].token_ids for prompt in prompts]
    assert again == alone
    assert [one.token_ids for one in engine.generate(prompts, max_new_tokens=40, ignore_eos=True)] == together


def test_a_second_engine_and_its_end_do_not_touch_the_first(tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model("llama3")
    prompt = prompts_of(tiny)[0]
    first = load_on(tiny.folder, graph="captured")
    expected = first.generate([prompt], max_new_tokens=30, ignore_eos=True)[0].token_ids
    second = load_on(tiny_model("qwen3").folder, graph="captured")
    second.generate([prompt], max_new_tokens=30, ignore_eos=True)
    assert first.generate([prompt], max_new_tokens=30, ignore_eos=True)[0].token_ids == expected
    second.close()
    torch.cuda.empty_cache()
    assert first.generate([prompt], max_new_tokens=30, ignore_eos=True)[0].token_ids == expected
