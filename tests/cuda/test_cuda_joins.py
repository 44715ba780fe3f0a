"""On a GPU, sequences that join and leave captured steps get the answers that they get alone, to the bit."""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_tokens
from support.engine_fakes import submit_staggered
from support.tiny_models import VOCAB, TinyModel

from graphcore import Engine
from graphcore.engine.output import Generation
from graphcore.engine.request_handle import RequestHandle

SECONDS = 120.0
FLOAT32 = 1e-4  # as in test_cuda_captured.py
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "min_p": 0.01},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.4},
)


def requests_of(seed: int, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts of one token up to four chunks, with settings of `Engine.submit`."""
    generator = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt = [generator.randrange(VOCAB) for _ in range(generator.choice((1, 2, 5, 16, 17, 33, 50)))]
        settings = {**generator.choice(SETTINGS), "max_new_tokens": generator.randint(1, 40)}
        settings |= {"seed": generator.randrange(1 << 40), "ignore_eos": generator.random() < 0.7}
        requests.append((prompt, settings))
    return requests


def submit(engine: Engine, request: tuple[list[int], dict[str, Any]], **more: Any) -> RequestHandle:
    prompt, settings = request
    return engine.submit(prompt, logprobs=True, **settings, **more)


def what(answer: Generation) -> tuple[Any, ...]:
    return answer.token_ids, answer.finish_reason, answer.logprobs


def warm(engine: Engine) -> None:
    """Capture the graphs of all settings, so that later requests run at full speed."""
    for settings in SETTINGS:
        engine.submit([1, 2, 3], 3, ignore_eos=True, **settings).result(SECONDS)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_5", "gemma4"])
def test_an_answer_does_not_depend_on_who_joins_beside_it(name: str, dtype: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    engine = load_on(tiny.folder, dtype=dtype)
    warm(engine)
    requests = requests_of(5, 30)
    alone = [what(submit(engine, request).result(SECONDS)) for request in requests]
    handles = submit_staggered(engine, [partial(submit, engine, request) for request in requests], random.Random(6))
    assert [what(handle.result(SECONDS)) for handle in handles] == alone
    assert max(handle.result().timings.batch for handle in handles) == 3


def test_answers_stay_where_weights_stream(tiny_model, load_on) -> None:
    engine = load_on(tiny_model("llama3").folder, streaming="on")
    warm(engine)
    requests = requests_of(8, 16)
    alone = [what(submit(engine, request).result(SECONDS)) for request in requests]
    handles = submit_staggered(engine, [partial(submit, engine, request) for request in requests], random.Random(6))
    assert [what(handle.result(SECONDS)) for handle in handles] == alone


def test_random_cancels_masks_and_errors_leave_every_other_answer_as_it_is_alone(tiny_model, load_on) -> None:
    engine = load_on(tiny_model("gemma3").folder)
    warm(engine)
    requests = requests_of(7, 20)
    alone = [what(submit(engine, request).result(SECONDS)) for request in requests]

    def odd(ids: Sequence[int]) -> torch.Tensor:
        if len(ids) == 9:
            raise ZeroDivisionError("in a mask")
        return torch.arange(VOCAB) % 2 == 1

    masked = engine.submit([4, 5], 8, mask=odd, ignore_eos=True, logprobs=True).result(SECONDS)
    assert all(token % 2 for token in masked.token_ids)

    def one(number: int) -> None:
        generator = random.Random(number)
        at, fate = generator.randrange(len(requests)), generator.random()
        if fate < 0.1:
            with pytest.raises(ZeroDivisionError):
                engine.submit([4, 5], 12, mask=odd, ignore_eos=True).result(SECONDS)
        elif fate < 0.2:
            found = engine.submit([4, 5], 8, mask=odd, ignore_eos=True, logprobs=True).result(SECONDS)
            assert what(found) == what(masked)
        elif fate < 0.4:
            handle = submit(engine, requests[at])
            time.sleep(generator.random() * 0.01)
            handle.cancel()
            found = handle.result(SECONDS)
            assert found.token_ids == alone[at][0][: len(found.token_ids)]
            assert found.logprobs == alone[at][2][: len(found.token_ids)]
        else:
            assert what(submit(engine, requests[at]).result(SECONDS)) == alone[at]

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(one, number) for number in range(400)]:
            done.result(SECONDS)
    assert engine.status() == []


def test_a_chat_goes_on_from_steps_that_nobody_was_given(tiny_model, load_on) -> None:
    """Gemma's rings have moved on with tokens of steps that ran after the end."""
    engine, eager = load_on(tiny_model("gemma3").folder), load_on(tiny_model("gemma3").folder, graph="eager")
    other = engine.submit([9, 8], 250, ignore_eos=True)
    history = list(range(1, 7))
    for _ in range(4):
        chat = engine.submit(history, 100, ignore_eos=True, reuse_cache=True)
        assert chat.event(11) is not None
        chat.cancel()
        answer = chat.result(SECONDS).token_ids
        expected = eager.submit(history, len(answer), ignore_eos=True).result(SECONDS).token_ids
        assert_same_tokens(answer, expected, history, eager, FLOAT32)
        history += [*answer[:20], 7, 8]
    other.cancel()
