"""One engine, many callers: threads and asyncio tasks get what transformers says, whoever calls beside them."""

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from tiny_models import TinyModel

from graphcore import Engine
from graphcore.engine.batch_run import TokenStream
from graphcore.engine.running_request import TokenEvent
from graphcore.engine.sampler import SamplingParams
from graphcore.errors import BusyError, ConfigError

SECONDS = 60.0
NEW_TOKENS = 10
PROMPTS = [[1, 2, 3], [40, 41], [7] * 12, [90, 5, 33, 2], [8]]
KINDS = {
    "eager": ("graph=eager",),
    "captured": ("graph=auto",),
    "streamed": ("graph=eager", "streaming=on"),
    "fallback": ("model.fallback=transformers",),
    "fallback streamed": ("model.fallback=transformers", "streaming=on"),
}
Tiny = Callable[[str], TinyModel]


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Leave what was there before out of garbage collections: each refused call looks for streams that nobody reaches.

    Among the objects of all tests before these, that takes seconds.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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


def in_line(engine: Engine, length: int) -> None:
    """Return when that many calls have the engine or wait for it."""
    given_up = threading.Event()
    timer = threading.Timer(SECONDS, given_up.set)
    timer.start()
    while len(engine._turns._line) < length:
        assert not given_up.is_set()
    timer.cancel()


def test_threads_that_generate_and_stream_get_their_own_tokens(engine: Engine, expected: list[list[int]]) -> None:
    calls = [(call, number) for call in (tokens, streamed) for number in range(len(PROMPTS))]
    with ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(lambda call: call[0](engine, PROMPTS[call[1]]), calls))
    assert found == [expected[number] for _, number in calls]


def test_a_thread_waits_for_a_stream_and_a_dropped_stream_makes_room(engine: Engine, expected: list[list[int]]) -> None:
    streams = [engine.stream(PROMPTS[0], max_new_tokens=NEW_TOKENS)]
    begun = [next(streams[0]).token_id, next(streams[0]).token_id]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(tokens, engine, PROMPTS[1])
        in_line(engine, 2)
        begun.append(next(streams[0]).token_id)
        assert not waiting.done()
        streams.clear()
        assert waiting.result(SECONDS) == expected[1]
    assert begun == expected[0][:3]


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
    changes = sum(one != other for one, other in pairwise(order))
    assert changes == len(PROMPTS) - 1  # nobody came between a stream's tokens


def test_tasks_that_call_without_threads_run_one_by_one_or_are_refused(
    engine: Engine, expected: list[list[int]]
) -> None:
    began = asyncio.Event()

    async def consume() -> list[int]:
        found = []
        for event in engine.stream(PROMPTS[0], max_new_tokens=NEW_TOKENS):
            found.append(event.token_id)
            began.set()
            await asyncio.sleep(0)
        return found

    async def call() -> list[int]:
        await began.wait()
        with pytest.raises(BusyError, match=r"^generate\(\) would stop this thread's event loop"):
            engine.generate(PROMPTS[1])
        return await asyncio.to_thread(tokens, engine, PROMPTS[1])

    async def main() -> list[list[int]]:
        assert [tokens(engine, prompt) for prompt in PROMPTS[:2]] == expected[:2]
        return await asyncio.wait_for(asyncio.gather(consume(), call()), SECONDS)

    assert asyncio.run(main()) == expected[:2]


def test_a_call_inside_the_loop_over_a_stream_is_refused_and_the_stream_goes_on(
    engine: Engine, expected: list[list[int]]
) -> None:
    found = []
    for event in engine.stream(PROMPTS[0], max_new_tokens=NEW_TOKENS):
        with pytest.raises(BusyError, match=r"^generate\(\) was called inside stream\(\) of the same engine"):
            engine.generate(PROMPTS[1])
        found.append(event.token_id)
    assert found == expected[0]
    assert tokens(engine, PROMPTS[1]) == expected[1]


def test_a_run_that_was_opened_before_another_call_does_not_trust_the_cache(
    engine: Engine, expected: list[list[int]]
) -> None:
    def opened() -> list[int]:
        run = engine.open_run([PROMPTS[2]], NEW_TOKENS, (), SamplingParams(), reuse_cache=True)
        tokens(engine, PROMPTS[0])
        found = [event.token_id for event in run.events()]
        assert run.cached == 0
        return found

    assert [opened(), opened()] == [expected[2]] * 2


def test_who_waits_for_an_engine_that_is_closed_is_told(tiny_model: Tiny) -> None:
    engine = Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", graph="eager")
    events = engine.stream(PROMPTS[0])
    next(events)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(tokens, engine, PROMPTS[1]), pool.submit(streamed, engine, PROMPTS[1])]
        in_line(engine, 3)
        engine.close()
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
        assert engine.choices.kv_dtype is torch.float16
    with pytest.raises(ConfigError, match=r"torch\.float64 is none that graphcore computes in"):
        Engine.load(folder, dtype=torch.float64)


def test_a_stream_that_another_thread_waits_in_is_busy() -> None:
    is_inside, may_go_on = threading.Event(), threading.Event()

    def events() -> Generator[TokenEvent, None, None]:
        is_inside.set()
        may_go_on.wait(SECONDS)
        yield TokenEvent(0, 1, "a", None, "end")

    stream = TokenStream(events())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, stream)
        is_inside.wait(SECONDS)
        for call in (lambda: next(stream), stream.close):
            with pytest.raises(BusyError, match="another thread waits for this stream's next token"):
                call()
        may_go_on.set()
        assert first.result().text == "a"


def test_a_stream_is_pulled_from_one_thread_at_a_time(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[0], max_new_tokens=2)
    assert isinstance(stream, TokenStream)
    assert len(list(stream)) == 2
