"""A pool of pages that is too small for all who ask: everybody finishes, with the answer that it has alone."""

import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import VOCAB, TinyModel

from graphcore import Engine, ForwardState
from graphcore.engine.output import Generation
from graphcore.engine.request_handle import RequestHandle
from graphcore.errors import ConfigError
from graphcore.kvcache.swap_file import SwapFile

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
SECONDS = 120.0
CONTEXT, SEQUENCES = 96, 6


def load(tiny: TinyModel, graph: str = "eager", tokens: int = CONTEXT) -> Engine:
    sizes = [f"batching.max_sequences={SEQUENCES}", f"context_length={CONTEXT}", "prefill_chunk=16"]
    pool = f"batching.cache_tokens={tokens}"
    return Engine.load(tiny.folder, dtype="fp32", device="cpu", graph=graph, overrides=[*sizes, pool])


def requests_of(seed: int, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts that share beginnings, with the settings of `Engine.submit`."""
    generator = random.Random(seed)
    shared = [generator.randrange(VOCAB) for _ in range(40)]
    requests = []
    for number in range(count):
        own = [generator.randrange(VOCAB) for _ in range(generator.choice((1, 2, 16, 17)))]
        prompt = [*shared[: generator.choice((0, 7, 20, 33, 40))], *own]
        settings: dict[str, Any] = {"max_new_tokens": generator.randint(10, 38), "ignore_eos": True, "logprobs": True}
        if number % 2:
            settings |= {"temperature": 1.3, "seed": number}
        requests.append((prompt, settings))
    return requests


def what(answer: Generation) -> tuple[Any, ...]:
    return answer.token_ids, answer.finish_reason, answer.logprobs


def submit_all(engine: Engine, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[RequestHandle]:
    with engine.holding_back():
        return [engine.submit(prompt, **settings) for prompt, settings in requests]


def alone(tiny: TinyModel, graph: str, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[tuple[Any, ...]]:
    """Return what each request is answered where nothing was computed before it."""
    with load(tiny, graph) as engine:
        found = []
        for prompt, settings in requests:
            with engine.while_idle():  # the last request has left
                engine._queue.batching._admission.clear_prefix_cache()  # type: ignore[attr-defined]
            found.append(what(engine.submit(prompt, **settings).result(SECONDS)))
        return found


@pytest.fixture
def num_swapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each sequence that is written to a file."""
    found: list[int] = []
    write = SwapFile.write.__func__  # type: ignore[attr-defined]

    def note(cls: type[SwapFile], kept: Any, folder: Any) -> SwapFile:
        found.append(kept.tokens)
        return write(cls, kept, folder)  # type: ignore[no-any-return]

    monkeypatch.setattr(SwapFile, "write", classmethod(note))
    return found


def check_all_pages_free(engine: Engine) -> None:
    """Check that no page is taken but by the tree, and none after it has forgotten everything."""
    passes: Any = engine._queue.batching
    engine._queue.run_alone("test", lambda: None)  # the last sequences have left
    admission = passes._admission
    assert not any(table.rows[row] for table in admission.pages.tables for row in range(SEQUENCES))
    assert not admission._swapped
    with torch.inference_mode(), engine.while_idle():  # the last request has left
        admission.clear_prefix_cache()
    assert [table.num_free for table in admission.pages.tables] == [table.num_pages for table in admission.pages.tables]


def nameless_files() -> set[str]:
    """Return the files without a name that this process has open."""
    targets = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {target for target in targets if "(deleted)" in target}


@pytest.fixture(autouse=True)
def files_before() -> Iterator[set[str]]:
    """Files that were open before the test; afterwards no others are."""
    before = nameless_files()
    yield before
    assert nameless_files() <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"), [("qwen3_5", "disk is full"), ("llama3", "folder is a file"), ("qwen3_5", "end is lost")]
)
def test_a_sequence_whose_file_fails_runs_again_and_changes_no_token(
    name: str, fault: str, tiny_model: Tiny, num_swapped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(4, 9)
    expected = alone(tiny_model(name), "eager", requests)
    tried: list[str] = []

    def fail(*_: object) -> None:
        tried.append(fault)
        raise OSError(28, fault)

    with load(tiny_model(name)) as engine:
        if fault == "disk is full":
            monkeypatch.setattr(SwapFile, "write", classmethod(fail))
        elif fault == "end is lost":
            monkeypatch.setattr(SwapFile, "_read_one", fail)
        else:
            engine._queue.batching._admission._folder = tiny_model(name).folder / "config.json"  # type: ignore[attr-defined]
        assert [what(handle.result(SECONDS)) for handle in submit_all(engine, requests)] == expected
        assert tried or num_swapped
        check_all_pages_free(engine)


def test_cancels_deadlines_masks_and_errors_under_pressure_take_nobody_down(tiny_model: Tiny) -> None:
    requests = requests_of(5, 30)
    expected = alone(tiny_model("llama3"), "auto", requests)

    def fail(ids: Sequence[int]) -> None:
        if len(ids) == 8:
            raise ZeroDivisionError("in a mask")

    with load(tiny_model("llama3"), "auto") as engine:
        fates: dict[int, dict[str, Any]] = {1: {"mask": fail}, 2: {"deadline": 0.05}, 3: {"mask": lambda ids: None}}
        handles = []
        for number, (prompt, settings) in enumerate(requests):
            handles.append(engine.submit(prompt, **{**settings, **fates.get(number % 7, {})}))
            if number % 7 == 4:
                handles[-2 if number % 2 else -1].cancel()
            if number == 15:
                engine.logits([[7] * 60])
        for number, (handle, answer) in enumerate(zip(handles, expected, strict=True)):
            if number % 7 == 1:
                with pytest.raises(ZeroDivisionError):
                    handle.result(SECONDS)
                continue
            found = handle.result(SECONDS)
            assert found.token_ids == answer[0][: len(found.token_ids)]
            if number % 7 in (0, 5, 6):
                assert what(found) == answer
        check_all_pages_free(engine)


def test_close_ends_those_who_are_swapped_out_and_their_files(
    tiny_model: Tiny, num_swapped: list[int], files_before: set[str]
) -> None:
    is_swapped, go_on = threading.Event(), threading.Event()
    engine = load(tiny_model("llama3"))

    def report(*_: object) -> None:
        if num_swapped and nameless_files() - files_before:
            is_swapped.set()
            go_on.wait(SECONDS)

    engine._on_progress = report
    handles = submit_all(engine, requests_of(6, 9))
    assert is_swapped.wait(SECONDS)
    assert any(not status.is_running and status.new_tokens for status in engine.status())
    closing = threading.Thread(target=engine.close)
    closing.start()
    go_on.set()
    closing.join(SECONDS)
    for handle in handles:
        if not handle.has_ended or handle._output.has_failed:
            with pytest.raises(ConfigError, match="closed"):
                handle.result(SECONDS)


def test_ctrl_c_ends_those_who_are_swapped_out_and_their_files_and_the_engine_goes_on(
    tiny_model: Tiny, num_swapped: list[int], files_before: set[str]
) -> None:
    requests, tiny = requests_of(6, 9), tiny_model("qwen3_5")
    expected = alone(tiny, "eager", requests)
    interrupted: list[int] = []

    def report(*_: object) -> None:
        files = nameless_files() - files_before
        if num_swapped and files and not interrupted:
            interrupted.append(len(files))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with load(tiny) as engine:
        engine._on_progress = report
        prompts, settings = [prompt for prompt, _ in requests], {"max_new_tokens": 38, "ignore_eos": True}
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, **settings)
        assert interrupted
        engine._on_progress = lambda *_: None
        engine._queue.run_alone("test", lambda: None)  # those who were cancelled have left
        assert nameless_files() <= files_before
        assert engine.status() == []
        assert [what(handle.result(SECONDS)) for handle in submit_all(engine, requests)] == expected
        check_all_pages_free(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["llama3", pytest.param("gemma3", marks=pytest.mark.slow), pytest.param("qwen3_5", marks=pytest.mark.thorough)],
)
def test_logits_and_hidden_states_under_pressure_are_those_of_an_idle_engine(
    name: str, tiny_model: Tiny, num_swapped: list[int]
) -> None:
    """They have the whole cache for a while, and those whose pages they took go on with the same tokens."""
    requests = requests_of(8, 12)
    expected = alone(tiny_model(name), "eager", requests)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (2, 40), generator=generator)
    hidden = torch.randn(2, 40, 64, generator=generator)
    with load(tiny_model(name)) as idle:
        logits, whole = idle.logits(ids), idle.forward(hidden)
        state = ForwardState()
        steps = [idle.forward(part, state) for part in hidden.split(16, dim=1)]
    with load(tiny_model(name)) as engine:
        handles = submit_all(engine, requests)
        for _ in range(3):
            assert torch.equal(engine.logits(ids), logits)
            assert torch.equal(engine.forward(hidden), whole)
        state = ForwardState()
        for part, step in zip(hidden.split(16, dim=1), steps, strict=True):
            assert torch.equal(engine.forward(part, state), step)
        assert any(status.new_tokens for status in engine.status()), "all had ended before"
        assert [what(handle.result(SECONDS)) for handle in handles] == expected
        assert num_swapped
        del state, steps
        engine.runner._holding._give_back_dropped()  # type: ignore[attr-defined]  # as whoever needs pages does
        check_all_pages_free(engine)


def test_chats_and_several_answers_under_pressure(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3"), "eager", 8 * CONTEXT) as roomy, load(tiny_model("llama3")) as engine:
        history = list(range(20))
        for turn in range(3):
            asked = [{"n": 4, "temperature": 1.2, "seed": turn}, {"reuse_cache": True}, {"reuse_cache": True}]
            answers = []
            for each in (roomy, engine):
                with each.holding_back():
                    handles = [each.submit(history, 14, ignore_eos=True, **settings) for settings in asked]
                answers.append([[answer.token_ids for answer in handle.results(SECONDS)] for handle in handles])
            assert answers[0] == answers[1]
            history += [*answers[0][1][0], 5, 6]
        check_all_pages_free(engine)


def test_logits_of_more_tokens_than_the_pool_are_refused_and_hurt_nothing(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3")) as engine:
        (prompt, settings), *_ = requests_of(7, 1)
        first = what(engine.submit(prompt, **settings).result(SECONDS))
        with pytest.raises(ConfigError, match=r"batching.cache_tokens"):
            engine.logits([[1] * 80, [2] * 80])
        assert what(engine.submit(prompt, **settings).result(SECONDS)) == first
        with pytest.raises(ConfigError, match=f"context_length={CONTEXT}"):
            engine.submit([1] * (CONTEXT + 1), 3)
        check_all_pages_free(engine)


def test_a_pool_smaller_than_one_context_is_refused(tiny_model: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"context_length=96, but batching.cache_tokens=95"):
        load(tiny_model("llama3"), "eager", CONTEXT - 1)
