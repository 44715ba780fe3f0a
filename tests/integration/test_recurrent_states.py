"""Recurrent states continue after the last token that they have seen, in any row, and after no earlier one."""

from collections.abc import Callable

import pytest
import torch
from streamed_engine import SIZES, runs_as
from tiny_models import TOLERANCE, TinyModel

from graphcore import Engine

Tiny = Callable[[str], TinyModel]
PROMPT = 21
NAMES = ("qwen3_5", "qwen3_5_moe", "lfm2")


def load(tiny: TinyModel, graph: str) -> Engine:
    overrides = SIZES if graph == "eager" else (*SIZES, "batch_size=1")
    return Engine.load(tiny.folder, dtype="fp32", device="cpu", graph=graph, overrides=list(overrides))


@pytest.mark.parametrize("graph", ["eager", "auto"])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_snapshot_brings_a_sequence_back_in_any_row(name: str, graph: str, tiny_model: Tiny) -> None:
    tiny = tiny_model(name)
    row, expected = tiny.ids[0].tolist(), tiny.logits[0]
    with load(tiny, graph) as engine:
        assert runs_as(engine, graph)
        runner, pages = engine.runner, engine.runner.pages
        runner.extend([row[:PROMPT]], [0])
        kept = pages.copy_out(0, PROMPT)
        first = runner.extend([row[PROMPT : PROMPT + 3]], [PROMPT])[0]
        assert (first - expected[PROMPT + 2]).abs().max() < TOLERANCE
        runner.extend([row[::-1]], [0])
        pages.free(0)
        assert pages.copy_in(0, kept)
        assert torch.equal(runner.extend([row[PROMPT : PROMPT + 3]], [PROMPT])[0], first)
        if graph == "eager":
            assert pages.copy_in(1, kept)
            found = runner.extend([row[:4], row[PROMPT : PROMPT + 1]], [0, PROMPT])
            assert (found[1] - expected[PROMPT]).abs().max() < TOLERANCE


@pytest.mark.parametrize("graph", ["eager", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_a_longer_prompt_goes_on_after_the_last_token_and_another_starts_anew(
    name: str, graph: str, tiny_model: Tiny
) -> None:
    """A state is used again only where nothing of it has to be forgotten."""
    tiny = tiny_model(name)
    ids = tiny.ids[1].tolist()
    prompts = (ids[:20], ids[:9], ids[3:30])
    with load(tiny, graph) as engine:
        fresh, again = ([engine.generate([one], 6)[0].token_ids for one in prompts] for _ in range(2))
        assert again == fresh
        engine.submit(ids[:20], 1, reuse_cache=True).result()
        handles = [engine.submit(prompt, 1, reuse_cache=True) for prompt in (ids[:21], [*ids[:19], 95, 94], ids[:20])]
        assert all(handle.result().token_ids for handle in handles)
        assert handles[0].cached == 20  # after the last token
        assert all(handle.cached in (0, 16) for handle in handles[1:])  # or where a chunk of the first prompt ended
