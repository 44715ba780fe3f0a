"""One engine, many callers: threads and asyncio tasks get what transformers says, whoever calls beside them."""

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.queues import Paced
from support.tiny_models import TinyModel

from graphcore import Engine
from graphcore.engine.request_handle import TokenStream
from graphcore.errors import ConfigError

SECONDS = 60.0
NEW_TOKENS = 5
PROMPTS = [[1, 2, 3], [40, 41], [7] * 12, [90, 5, 33, 2], [8]]
KINDS = {
    "eager": ("graph=eager",),
    "captured": ("graph=auto",),
    "streamed": ("graph=eager", "streaming=on"),
    "fallback": ("model.fallback=transformers",),
    "fallback streamed": ("model.fallback=transformers", "streaming=on"),
}
Tiny = Callable[[str], TinyModel]


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tiny_model: Tiny) -> Iterator[Engine]:
    overrides = ["context_length=64", *KINDS[request.param]]
    with Engine.load(tiny_model("llama3").folder, dtype=torch.float32, device="cpu", overrides=overrides) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(tiny_model: Tiny) -> list[list[int]]:
    """The likeliest tokens after each prompt, each by a whole pass of transformers."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(tiny_model("llama3").logits_of(torch.tensor([ids]))[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def tokens(engine: Engine, prompt: list[int]) -> list[int]:
    return list(engine.generate(prompt, max_new_tokens=NEW_TOKENS)[0].token_ids)


def streamed(engine: Engine, prompt: list[int]) -> list[int]:
    return [event.token_id for event in engine.stream(prompt, max_new_tokens=NEW_TOKENS)]


@pytest.mark.thorough
def test_threads_that_generate_and_stream_get_their_own_tokens(engine: Engine, expected: list[list[int]]) -> None:
    calls = [(call, number) for call in (tokens, streamed) for number in range(len(PROMPTS))]
    with ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(lambda call: call[0](engine, PROMPTS[call[1]]), calls))
    assert found == [expected[number] for _, number in calls]


def test_a_dropped_stream_makes_room(engine: Engine, expected: list[list[int]]) -> None:
    stream = engine.stream(PROMPTS[0], max_new_tokens=50)
    begun = [next(stream).token_id, next(stream).token_id]
    del stream
    assert tokens(engine, PROMPTS[1]) == expected[1]
    assert begun == expected[0][:2]
    assert engine.status() == []


def test_tasks_of_one_event_loop_share_an_engine(engine: Engine, expected: list[list[int]]) -> None:
    order: list[int] = []

    async def consume(number: int) -> list[int]:
        """Stream with a thread for each token, which may be another one each time."""
        found, events = [], engine.stream(PROMPTS[number], max_new_tokens=NEW_TOKENS)
        while (event := await asyncio.to_thread(next, events, None)) is not None:
            found.append(event.token_id)
            order.append(number)
        return found

    async def main() -> list[list[int]]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(len(PROMPTS) + 2))
        whole = asyncio.to_thread(tokens, engine, PROMPTS[0])
        return await asyncio.wait_for(asyncio.gather(*map(consume, range(len(PROMPTS))), whole), SECONDS)

    assert asyncio.run(main()) == [*expected, expected[0]]
    assert sorted(order) == [number for number in range(len(PROMPTS)) for _ in range(NEW_TOKENS)]


def test_handles_are_awaited_and_iterated_without_threads(engine: Engine, expected: list[list[int]]) -> None:
    async def consume(number: int) -> list[int]:
        return [event.token_id async for event in engine.submit(PROMPTS[number], NEW_TOKENS)]

    async def wait(number: int) -> list[int]:
        return list((await engine.submit(PROMPTS[number], NEW_TOKENS)).token_ids)

    async def main() -> list[list[int]]:
        calls = [*map(consume, range(len(PROMPTS))), *map(wait, range(len(PROMPTS)))]
        return await asyncio.wait_for(asyncio.gather(*calls), SECONDS)

    assert asyncio.run(main()) == expected * 2


def test_who_waits_for_an_engine_that_is_closed_is_told(tiny_model: Tiny) -> None:
    engine = Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", graph="eager")
    events = Paced(engine, PROMPTS[0], 1000)
    next(events)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(tokens, engine, PROMPTS[1]), pool.submit(streamed, engine, PROMPTS[1])]
        while len(engine.status()) < 3:
            continue
        events.close_engine()
        for call in waiting:
            with pytest.raises(ConfigError, match="this engine is closed; load it again"):
                call.result(SECONDS)


def test_an_engine_says_what_it_is_and_why_it_cannot_be_pickled(tiny_model: Tiny) -> None:
    folder = tiny_model("llama3").folder
    with Engine.load(folder, dtype=torch.bfloat16, device="cpu", graph="eager") as engine:
        assert repr(engine) == f"Engine({folder}, llama, 3 layers, cpu, bf16, graph=eager, streaming=off)"
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot be pickled or copied: .* call Engine.load there") as caught:
                copied(engine)
            assert "\n" not in str(caught.value)
    assert repr(engine) == f"Engine({folder}, llama, 3 layers, closed)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_torch_dtype_is_taken_where_a_name_is(dtype: torch.dtype, tiny_model: Tiny) -> None:
    folder, cached = tiny_model("llama3").folder, f"kv_dtype={torch.float16}"
    with Engine.load(folder, dtype=dtype, device="cpu", graph="eager", overrides=[cached]) as engine:
        assert engine.choices.dtype is dtype
        assert engine.choices.kv_dtype == (torch.float16, torch.float16)
    with pytest.raises(ConfigError, match=r"torch\.float64 is not a compute dtype"):
        Engine.load(folder, dtype=torch.float64)


def test_two_threads_share_the_tokens_of_a_stream(engine: Engine, expected: list[list[int]]) -> None:
    stream = engine.stream(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda _: [event.token_id for event in stream], range(2)))
    assert sorted([*parts[0], *parts[1]]) == sorted(expected[0])


def test_a_closed_stream_gives_no_more_tokens(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[0], max_new_tokens=50)
    assert isinstance(stream, TokenStream)
    next(stream)
    stream.close()
    assert list(stream) == []
