"""Logits of a captured decode step are the eager ones, one sequence and three.

Tolerances: in float32 both sum the same products in another order, and logits are of order one. In half precision they
may differ by what the dtype costs at all: the eager error against transformers in float32, doubled.
"""

from collections.abc import Sequence

import pytest
from support.comparisons import error_of_most, largest_error, step_logits
from support.tiny_models import ARCHITECTURES, MIXTURES, TinyModel

PROMPT = 20
FLOAT32 = 1e-4
HALF_FACTOR = 2.0


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
    error = error_of_most if name in MIXTURES else largest_error
    allowed = HALF_FACTOR * error(eager, expected)
    assert error(captured, expected) < allowed
    assert error(captured, eager) < allowed


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3_moe", "qwen3_5", "deepseek_v3"])
def test_captured_steps_of_compiled_blocks_have_the_eager_logits(name: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    eager = load_on(tiny.folder, graph="eager")
    captured = load_on(tiny.folder, "graph.blocks=compiled", graph="captured")
    assert captured.stats["blocks"] == "compiled"
    for batch in (1, 3):
        rows = rows_of(tiny)[:batch]
        found = step_logits(captured, rows, PROMPT)
        assert largest_error(found, step_logits(eager, rows, PROMPT)) < FLOAT32
    assert captured.runner.builder.captures.num_graphs > 0


@pytest.mark.parametrize("streaming", ["off", "on"])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3_moe", "qwen3_5", "deepseek_v3"])
def test_captured_chunks_of_prompts_have_the_uncaptured_logits(name: str, streaming: str, tiny_model, load_on) -> None:
    """A chunk of 16 is not padded, and has the same bits; what is padded differs by rounding."""
    tiny: TinyModel = tiny_model(name)
    given = f"streaming={streaming}", *(["streaming.layer_group_size=1"] if streaming == "on" else [])
    compiled, captured = (load_on(tiny.folder, f"graph.prefill={one}", *given) for one in ("compiled", "captured"))
    assert captured.stats["prefill"] == "captured"
    rows = [row[:16] for row in rows_of(tiny)]
    for _ in range(2):  # the first captures
        whole = captured.runner.extend(rows, [0] * len(rows))
        assert largest_error(whole, compiled.runner.extend(rows, [0] * len(rows))) == 0
    rows = [row[:length] for row, length in zip(rows_of(tiny), (29, 21, 7), strict=True)]
    found = captured.runner.extend(rows, [0] * len(rows))
    assert largest_error(found, compiled.runner.extend(rows, [0] * len(rows))) < FLOAT32
    assert largest_error(captured.runner.extend(rows, [0] * len(rows)), found) == 0


@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt_oss"])
def test_dependent_launches_change_no_bit(name: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    rows = tiny.ids.tolist()
    found = [
        step_logits(load_on(tiny.folder, f"dependent_launches={word}", dtype="bf16"), rows, PROMPT)
        for word in ("off", "auto", "auto")
    ]
    assert largest_error(found[1], found[0]) == 0
    assert largest_error(found[2], found[1]) == 0
