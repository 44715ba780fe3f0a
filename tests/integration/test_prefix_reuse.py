"""A chat that goes on from its cache says what a chat that runs everything again says, rings and all."""

from collections.abc import Callable

import pytest
import torch
from tiny_models import VOCAB, WINDOW, TinyModel

from graphcore import Engine
from graphcore.engine.batch_run import BatchRun
from graphcore.engine.sampler import SamplingParams

Tiny = Callable[[str], TinyModel]
Load = Callable[[str, str], Engine]
NEW_TOKENS = 12


def run(engine: Engine, prompt: list[int], reuse: bool) -> tuple[BatchRun, list[int]]:
    opened = engine.open_run([prompt], NEW_TOKENS, (), SamplingParams(), end_ids=frozenset(), reuse_cache=reuse)
    for _ in opened.events():
        continue
    return opened, list(opened.generations()[0].token_ids)


def turn(engine: Engine, prompt: list[int]) -> tuple[int, list[int]]:
    """Take one turn as a chat does; return how many tokens were not run again, and the answer."""
    opened, answer = run(engine, prompt, reuse=True)
    assert engine.runner.held_ids == [*prompt, *answer[:-1]]  # the last token was chosen, but never run
    return opened.cached, answer


def words(generator: torch.Generator, length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@pytest.mark.parametrize("name", ["llama3", "gpt2", "mistral", "gemma3"])
def test_turns_of_a_chat_are_answered_the_same(name: str, tiny_model: Tiny, load_tiny: Load) -> None:
    engine, generator = load_tiny(name, "eager"), torch.Generator().manual_seed(4)
    history: list[int] = []
    expected_reuse = 0
    for length in (3, 1, 20, 2, 17):
        history += words(generator, length)
        reused, answer = turn(engine, history)
        assert reused == expected_reuse
        expected_reuse = len(history) + NEW_TOKENS - 1
        logits = tiny_model(name).logits_of(torch.tensor([history + answer]))[0]
        assert answer == logits[len(history) - 1 : -1].argmax(dim=-1).tolist()
        history += answer


@pytest.mark.parametrize(
    ("name", "keeps"),
    [("llama3", True), ("gemma3", False)],  # a ring that has wrapped has lost what is before its window
)
def test_a_prompt_that_turns_off_goes_back_only_where_the_cache_can(
    name: str, keeps: bool, tiny_model: Tiny, load_tiny: Load
) -> None:
    engine, generator = load_tiny(name, "eager"), torch.Generator().manual_seed(6)
    first = words(generator, 30)
    assert len(first) > 2 * WINDOW
    turn(engine, first)
    # Off at token 20, then a beginning of what is cached, then the first prompt again, then the same once more.
    prompts = (first[:20] + words(generator, 9), first[:15], first, first)
    for prompt, common in zip(prompts, (20, 14, 15, 29), strict=True):
        reused, answer = turn(engine, prompt)
        assert reused == (common if keeps else 0)
        fresh = tiny_model(name).logits_of(torch.tensor([prompt + answer]))[0]
        assert answer == fresh[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def test_a_ring_that_has_not_wrapped_goes_back(tiny_model: Tiny, load_tiny: Load) -> None:
    engine = load_tiny("gemma3", "eager")
    with torch.inference_mode():
        engine.runner.feed([[1, 2, 3, 4, 5]], [0])
    engine.runner.held_ids = [1, 2, 3, 4, 5]
    reused, answer = turn(engine, [1, 2, 3, 9])
    assert reused == 3
    logits = tiny_model("gemma3").logits_of(torch.tensor([[1, 2, 3, 9, *answer]]))[0]
    assert answer == logits[3:-1].argmax(dim=-1).tolist()


def test_whatever_else_runs_forgets_the_cache(load_tiny: Load) -> None:
    engine = load_tiny("llama3", "eager")
    prompt = [1, 2, 3, 4]
    others = (
        lambda: engine.logits([[9, 9]]),
        lambda: engine.forward(torch.zeros(1, 2, 64)),
        lambda: engine.generate([[9]], max_new_tokens=1),
        lambda: list(engine.stream([9], max_new_tokens=1)),
    )
    for other in others:
        _, answer = turn(engine, prompt)
        other()
        assert turn(engine, prompt) == (0, answer)
    assert turn(engine, prompt)[0] == len(prompt) - 1
    assert run(engine, prompt, reuse=False)[0].cached == 0


def test_only_a_single_prompt_reuses_the_cache(load_tiny: Load) -> None:
    engine = load_tiny("llama3", "eager")
    turn(engine, [1, 2, 3, 4])
    batch = engine.open_run([[1, 2, 3, 4, 5], [7]], 1, (), SamplingParams(), reuse_cache=True)
    list(batch.events())
    assert batch.cached == 0
    assert not engine.runner.held_ids
