"""A chat that goes on from its cache says what a chat that runs everything again says, rings and all."""

from collections.abc import Callable

import pytest
import torch
from tiny_models import VOCAB, WINDOW, TinyModel

from graphcore import Engine

Tiny = Callable[[str], TinyModel]
Load = Callable[[str, str], Engine]
NEW_TOKENS = 12


def run(engine: Engine, prompt: list[int], reuse: bool) -> tuple[int, list[int]]:
    handle = engine.submit(prompt, NEW_TOKENS, ignore_eos=True, reuse_cache=reuse)
    answer = list(handle.result().token_ids)
    return handle.cached, answer


def turn(engine: Engine, prompt: list[int]) -> tuple[int, list[int]]:
    """Take one turn as a chat does; return how many tokens were not run again, and the answer."""
    return run(engine, prompt, reuse=True)


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


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_a_prompt_that_turns_off_goes_back_to_what_it_shares(name: str, tiny_model: Tiny, load_tiny: Load) -> None:
    """Rings keep pages that nobody else needs, too."""
    engine, generator = load_tiny(name, "eager"), torch.Generator().manual_seed(6)
    first = words(generator, 30)
    assert len(first) > 2 * WINDOW
    turn(engine, first)
    # Off at token 20, then a beginning of what is cached, then the first prompt again, then the same once more.
    prompts = (first[:20] + words(generator, 9), first[:15], first, first)
    for prompt, common in zip(prompts, (20, 14, 29, 29), strict=True):
        reused, answer = turn(engine, prompt)
        assert reused == common
        fresh = tiny_model(name).logits_of(torch.tensor([prompt + answer]))[0]
        assert answer == fresh[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def test_a_ring_that_has_not_wrapped_goes_back(tiny_model: Tiny, load_tiny: Load) -> None:
    engine = load_tiny("gemma3", "eager")
    engine.submit([1, 2, 3, 4, 5], 1, ignore_eos=True, reuse_cache=True).result()
    reused, answer = turn(engine, [1, 2, 3, 9])
    assert reused == 3
    logits = tiny_model("gemma3").logits_of(torch.tensor([[1, 2, 3, 9, *answer]]))[0]
    assert answer == logits[3:-1].argmax(dim=-1).tolist()


def test_what_uses_the_whole_cache_puts_everything_back(load_tiny: Load) -> None:
    engine = load_tiny("llama3", "eager")
    prompt = [1, 2, 3, 4]
    for other in (lambda: engine.logits([[9, 9]]), lambda: engine.forward(torch.zeros(1, 2, 64))):
        _, answer = turn(engine, prompt)
        other()
        assert turn(engine, prompt) == (len(prompt) - 1, answer)


def test_other_requests_take_the_rows_that_hold_least(load_tiny: Load) -> None:
    engine = load_tiny("llama3", "eager")
    prompt = [1, 2, 3, 4]
    _, answer = turn(engine, prompt)
    engine.generate([[9]], max_new_tokens=1)
    assert turn(engine, prompt) == (len(prompt) - 1, answer)
    engine.generate([[9]] * engine.runner.sizes.batch_size, max_new_tokens=3, ignore_eos=True)
    assert turn(engine, prompt)[1] == answer
    assert run(engine, prompt, reuse=False) == (0, answer)


def test_each_of_several_chats_goes_on_from_its_own_row(load_tiny: Load, tiny_model: Tiny) -> None:
    engine = load_tiny("llama3", "eager")
    chats = [[31, 32, 33, 34], [49, 48, 47]]
    for is_second in (False, True):
        handles = [engine.submit(chat, NEW_TOKENS, ignore_eos=True, reuse_cache=True) for chat in chats]
        answers = [list(handle.result().token_ids) for handle in handles]
        for chat, answer in zip(chats, answers, strict=True):
            logits = tiny_model("llama3").logits_of(torch.tensor([chat + answer]))[0]
            assert answer == logits[len(chat) - 1 : -1].argmax(dim=-1).tolist()
        assert [handle.cached for handle in handles] == [len(chat) - 2 if is_second else 0 for chat in chats]
        chats = [[*chat, *answer, 5] for chat, answer in zip(chats, answers, strict=True)]
