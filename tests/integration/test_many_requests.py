"""Requests that run beside others get the answers that they get alone, to the bit, whoever joins, leaves or fails."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden_models import write_checkpoint
from support.streaming import collect_until
from support.tiny_models import VOCAB, TinyModel, add_tokenizer

from graphcore import Engine
from graphcore.engine.output import Generation
from graphcore.engine.request_handle import RequestHandle
from graphcore.errors import BusyError, ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from many_requests import STORM_KINDS, mixed_storm

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
SECONDS = 120.0
SEQUENCES = 6


def load(tiny: TinyModel, *overrides: str) -> Engine:
    sizes = (f"batching.max_sequences={SEQUENCES}", "context_length=96", "prefill_chunk=16")
    return Engine.load(tiny.folder, dtype="fp32", device="cpu", overrides=[*sizes, *overrides])


@dataclass(frozen=True)
class Request:
    """A request of a test: its prompt, and the settings of `Engine.submit`."""

    prompt: tuple[int, ...]
    settings: tuple[tuple[str, Any], ...]

    @classmethod
    def draw(cls, generator: random.Random) -> "Request":
        """Return a request with a prompt of up to four chunks, greedy or sampled."""
        prompt = tuple(generator.randrange(VOCAB) for _ in range(generator.choice((1, 2, 5, 16, 17, 33, 50))))
        settings = {"max_new_tokens": generator.randint(1, 14), "ignore_eos": generator.random() < 0.7}
        if generator.random() < 0.6:
            cuts = {"top_k": generator.choice((0, 20)), "top_p": generator.choice((1.0, 0.9))}
            settings |= {"temperature": 1.3, "seed": generator.randrange(1 << 40), **cuts}
        if generator.random() < 0.3:
            settings["repetition_penalty"] = 1.3
        return cls(prompt, tuple(settings.items()))

    def submit(self, engine: Engine) -> RequestHandle:
        return engine.submit(list(self.prompt), logprobs=True, **dict(self.settings))


def what(answer: Generation) -> tuple[Any, ...]:
    """Return what an answer says, with its log probabilities, which show any other bit of the logits."""
    return answer.token_ids, answer.finish_reason, answer.logprobs


def requests_of(seed: int, count: int) -> list[Request]:
    generator = random.Random(seed)
    return [Request.draw(generator) for _ in range(count)]


def test_random_joins_cancels_and_errors_leave_every_answer_as_it_is_alone(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3")) as engine:
        requests = requests_of(7, 24)
        alone = {request: what(request.submit(engine).result(SECONDS)) for request in requests}
        run_storm(engine, requests, alone, count=150)
        assert engine.status() == []


def run_storm(engine: Engine, requests: Sequence[Request], alone: dict[Request, tuple[Any, ...]], count: int) -> None:
    """Submit random requests from several threads; some are cancelled, some fail; check all others."""

    def fail(ids: Sequence[int]) -> None:
        if len(ids) == 2:
            raise ZeroDivisionError("in a mask")

    def one(number: int) -> None:
        generator = random.Random(number)
        request, fate = generator.choice(requests), generator.random()
        if fate < 0.1:
            handle = engine.submit(list(request.prompt), max_new_tokens=5, ignore_eos=True, mask=fail)
            with pytest.raises(ZeroDivisionError):
                handle.result(SECONDS)
            return
        handle = request.submit(engine)
        if fate < 0.3:
            time.sleep(generator.random() * 0.02)
            handle.cancel()
            tokens, _, logprobs = alone[request]
            found = handle.result(SECONDS)
            assert found.token_ids == tokens[: len(found.token_ids)]
            assert found.logprobs == logprobs[: len(found.token_ids)]
            return
        if fate < 0.4:
            del handle  # nobody can read it
            return
        assert what(handle.result(SECONDS)) == alone[request]

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(one, number) for number in range(count)]:
            done.result(SECONDS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        ("dense", "fp32", ("speculation=lookup", "batching.cache_tokens=320")),  # chats find their answers again
        ("window", "bf16", ("batching.cache_tokens=320",)),
        ("recurrent", "fp32", ()),
    ],
)
def test_sixty_requests_of_every_kind_in_a_cache_that_is_too_small_are_answered_as_alone(
    kind: str, dtype: str, settings: Sequence[str], tmp_path: Path
) -> None:
    folder = write_checkpoint(kind, tmp_path)
    add_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    found = mixed_storm(folder, 60, 4, dtype, settings)
    assert found.differences == []
    assert all(found.counts[name] for name in (*STORM_KINDS, "begun in the cache"))
    assert found.counts["compared"] > 50


def test_a_mask_allows_some_tokens_alone(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3")) as engine:
        seen: list[tuple[int, ...]] = []

        def even(ids: Sequence[int]) -> torch.Tensor:
            seen.append(tuple(ids))
            return torch.arange(VOCAB) % 2 == 0

        answer = engine.submit([1, 2, 3], 6, mask=even, ignore_eos=True, temperature=2.0).result()
        assert all(token % 2 == 0 for token in answer.token_ids)
        assert seen == [answer.token_ids[:at] for at in range(6)]
        for mask, said in (
            (lambda _: torch.zeros(VOCAB, dtype=torch.bool), "mask allows no token"),
            (lambda _: torch.ones(3, dtype=torch.bool), r"found torch.bool \[3\]"),
            (lambda _: [True], "found list"),
        ):
            with pytest.raises(ConfigError, match=said):
                engine.submit([1, 2, 3], 6, mask=mask).result()


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3"), "batching.max_sequences=1") as engine:
        held, free = threading.Event(), threading.Event()

        def hold(ids: Sequence[int]) -> None:
            if ids:  # the request has run
                held.set()
                free.wait(SECONDS)

        engine.generate([1, 2], 1)  # programs are built, so that the first pass comes long before the deadline
        running = engine.submit([1, 2], 20, mask=hold, deadline=1.0, ignore_eos=True)
        assert held.wait(SECONDS)
        waiting = engine.submit([1, 2], 20, deadline=0.1)
        time.sleep(1.1)
        free.set()
        assert waiting.result(SECONDS).finish_reason == "deadline"
        assert waiting.result().token_ids == ()
        assert running.result(SECONDS).finish_reason == "deadline"
        assert 1 <= len(running.result().token_ids) < 20
        for wrong in (0, -1.0, "soon", True):
            with pytest.raises(ConfigError, match="deadline="):
                engine.submit([1], deadline=wrong)  # type: ignore[arg-type]


def test_a_full_queue_refuses_and_generate_waits(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3"), "batching.max_sequences=1", "batching.max_waiting=2") as engine:
        held, free = threading.Event(), threading.Event()

        def hold(ids: Sequence[int]) -> None:
            if ids:  # the request has run
                held.set()
                free.wait(SECONDS)

        first = engine.submit([1, 2], 3, mask=hold)
        assert held.wait(SECONDS)
        others = [engine.submit([3, at], 3) for at in range(2)]
        assert [status.is_running for status in engine.status()] == [True, False, False]
        with pytest.raises(BusyError, match=r"2 requests wait already, and batching.max_waiting=2"):
            engine.submit([5, 6], 3)
        with ThreadPoolExecutor(1) as pool:
            patient = pool.submit(engine.generate, [[7, at] for at in range(5)], 3)
            time.sleep(0.05)
            assert not patient.done()
            free.set()
            assert len(patient.result(SECONDS)) == 5
        assert all(handle.result(SECONDS).token_ids for handle in (first, *others))


def test_a_long_prompt_goes_in_chunks_between_the_tokens_of_another(tiny_model: Tiny) -> None:
    """The other sequence gets a token in each pass, and the prompt's chunks are 16 tokens."""
    with load(tiny_model("llama3")) as engine:
        seen: list[tuple[str, int, int]] = []
        is_submitted = threading.Event()

        def report(stage: str, _: object, done: int, total: int) -> None:
            seen.append((stage, done, total))
            if stage == "generate":
                is_submitted.wait(SECONDS)

        engine._on_progress = report
        short = engine.submit([1, 2], 60, ignore_eos=True)
        assert short.event(0) is not None
        long = engine.submit(list(range(80)), 2, ignore_eos=True)
        is_submitted.set()
        long.result(SECONDS), short.result(SECONDS)
        chunks = [at for at, report in enumerate(seen) if report[0] == "prefill" and report[2] == 80]
        assert [seen[at][1] for at in chunks] == [16, 32, 48, 64, 80]
        assert [seen[at][0] for begin, end in pairwise(chunks) for at in range(begin + 1, end)] == ["generate"] * 4


def test_an_error_in_a_callers_function_at_the_end_stops_nobody(tiny_model: Tiny) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with load(tiny_model("llama3")) as engine:
        ended = engine.submit([1, 2], 10, ignore_eos=True)
        ended.call_at_end(fail)
        late = engine.submit([1, 2], 60, ignore_eos=True, deadline=0.02, mask=lambda _: time.sleep(0.01))
        late.call_at_end(fail)
        assert ended.result(SECONDS).finish_reason == "length"
        assert late.result(SECONDS).finish_reason == "deadline"
        assert engine.submit([3, 4], 3).result(SECONDS).token_ids


def test_a_function_at_the_end_may_take_a_lock_that_a_caller_of_the_engine_holds(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3")) as engine:
        lock, is_called = threading.Lock(), threading.Event()

        def take() -> None:
            is_called.set()
            with lock:
                pass

        with lock:
            late = engine.submit([1, 2], 60, ignore_eos=True, deadline=0.02, mask=lambda _: time.sleep(0.01))
            late.call_at_end(take)
            assert is_called.wait(SECONDS)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(engine.status).result(SECONDS) == []


def test_an_error_ends_the_other_answers_of_its_request_alone(tiny_model: Tiny) -> None:
    calls: list[int] = []

    def fail(ids: Sequence[int]) -> None:
        calls.append(len(ids))
        if len(calls) == 4:
            raise SystemExit(3)
        time.sleep(0.01)

    with load(tiny_model("llama3")) as engine:
        other = engine.submit([3, 4], 60, ignore_eos=True)
        failing = engine.submit([1, 2], 60, n=3, mask=fail, ignore_eos=True)
        with pytest.raises(SystemExit):
            failing.results(SECONDS)
        assert other.result(SECONDS).finish_reason == "length"
        assert engine.submit([5], 1).result(SECONDS).token_ids
        assert engine.status() == []
        assert len(calls) < 12


def test_a_handle_that_its_own_mask_holds_is_collected(tiny_model: Tiny) -> None:
    def submitted() -> "weakref.ref[RequestHandle]":
        held: list[RequestHandle] = []

        def mask(ids: Sequence[int]) -> None:
            assert len(held) < 2

        held.append(engine.submit([1, 2], 3, mask=mask))
        held[0].result(SECONDS)
        return weakref.ref(held[0])

    with load(tiny_model("llama3")) as engine:
        found = submitted()
        assert collect_until(lambda: found() is None)


def test_a_stream_is_over_after_ctrl_c(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny_model("llama3")) as engine:
        events = engine.stream([1, 2], 60)

        def interrupt(self: RequestHandle, at: int) -> None:
            raise KeyboardInterrupt

        next(events)
        with monkeypatch.context() as patch:
            patch.setattr(RequestHandle, "event", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(events)
        assert list(events) == []


@pytest.mark.parametrize("error", [(KeyError("x"),), (KeyError, "x"), (KeyError, KeyError("x")), (KeyError,)])
def test_an_error_thrown_into_a_stream_comes_out_whole(error: tuple[Any, ...], tiny_model: Tiny) -> None:
    with load(tiny_model("llama3")) as engine:
        events = engine.stream([1, 2], 60)
        next(events)
        with pytest.raises(KeyError) as raised:
            events.throw(*error)
        assert raised.value.args == (("x",) if error != (KeyError,) else ())
        assert list(events) == []


def test_who_could_only_wait_for_ever_is_told_so(tiny_model: Tiny) -> None:
    async def wait(handle: RequestHandle) -> Generation:
        return await handle

    with load(tiny_model("llama3")) as engine:
        with engine.holding_back():
            handle = engine.submit([1, 2], 3, ignore_eos=True)
            waits: list[Callable[[], object]] = [
                handle.result,
                lambda: next(iter(handle)),
                lambda: asyncio.run(wait(handle)),
                lambda: engine.generate([3, 4], 3),
            ]
            for one in waits:
                with pytest.raises(BusyError, match="after the block"):
                    one()
        assert len(handle.result(SECONDS).token_ids) == 3

        def mask(ids: Sequence[int]) -> None:
            if ids:
                inside.result()

        inside = engine.submit([1, 2], 3, mask=mask, ignore_eos=True)
        with pytest.raises(BusyError, match="wait for itself"):
            inside.result(SECONDS)


def test_a_function_at_the_end_may_take_a_lock_while_the_engine_is_closed(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3")) as engine:
        lock, is_called = threading.Lock(), threading.Event()

        def take() -> None:
            is_called.set()
            with lock:
                pass

        handles = [engine.submit([1, 2], 90, ignore_eos=True, mask=lambda _: time.sleep(0.01)) for _ in range(8)]
        for handle in handles:
            handle.call_at_end(take)
        with lock, ThreadPoolExecutor(1) as pool:
            closing = pool.submit(engine._queue.stop)
            assert is_called.wait(SECONDS)
            assert pool.submit(engine._queue.status).result(SECONDS) is not None
            closing.result(SECONDS)
        for handle in handles:
            with pytest.raises(ConfigError, match="closed"):
                handle.result(SECONDS)


@pytest.mark.slow
def test_a_forked_process_waits_for_no_lock_of_its_parent_and_a_thread_goes_on_after_the_main_thread(
    tiny_model: Tiny,
) -> None:
    script = f"""
import faulthandler, os, threading
from graphcore import Engine

engine = Engine.load({str(tiny_model("llama3").folder)!r}, device="cpu", overrides=["context_length=64", "threads=1"])
is_held, free = threading.Event(), threading.Event()

def hold():
    with engine.holding_back():
        is_held.set()
        free.wait()

def work():
    threading.main_thread().join()
    print(len(engine.generate([1, 2, 3], 5, ignore_eos=True)[0].token_ids))

threading.Thread(target=hold).start()
is_held.wait()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(10, exit=True)
    engine.status()
    engine.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
free.set()
threading.Thread(target=work).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout) == (0, "7\n5\n"), done.stderr
