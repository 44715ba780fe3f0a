"""A cache that is too small for all sequences, where a device chooses tokens two steps ahead: nothing changes a token.

Three sequences share the pages of one and a half. The latest ones are swapped out, swapped in, or run again.
"""

import random
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from support.engine_fakes import choose_plainly
from support.fake_cuda import TINY, FakeCuda, captured_engine, engine_of, fake_cuda
from support.tiny_models import add_tokenizer
from test_device_joins import GREEDY, NUCLEUS, PENALISED, PLAIN, SECONDS, VOCAB, Call, odd, what

from graphcore import Engine
from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.request import Request
from graphcore.kvcache.page_allocator import SwappedSequence
from graphcore.kvcache.swap_file import SwapFile
from graphcore.serving.tool_formats.answer_parser import AnswerParser, AnswerStops
from graphcore.serving.tool_formats.tool_format import ToolFormat

pytestmark = pytest.mark.thorough

SMALL = ("context_length=64", "batching.cache_tokens=96")


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    choose_plainly(monkeypatch)
    return fake_cuda(monkeypatch)


@pytest.fixture
def swapped_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the tokens that each sequence held when it was swapped out."""
    tokens: list[int] = []
    before = Request.swap_out

    def note(request: Request) -> None:
        tokens.append(request.num_computed)
        before(request)

    monkeypatch.setattr(Request, "swap_out", note)
    return tokens


def crowd(seed: int) -> list[Call]:
    generator = random.Random(seed)
    ways: tuple[dict[str, Any], ...] = (GREEDY, PLAIN, NUCLEUS, PENALISED, {"mask": odd, **NUCLEUS}, {"logprobs": True})
    return [
        Call([generator.randrange(VOCAB) for _ in range(generator.randint(1, 24))], 32, **ways[at % len(ways)])
        for at in range(8)
    ]


def answers(engine: Engine, requests: list[Call]) -> list[tuple[tuple[int, ...], str]]:
    with engine.holding_back():
        handles = [request.submit(engine) for request in requests]
    return [what(handle.result(SECONDS)) for handle in handles]


def fail(kept: SwappedSequence, folder: object) -> SwapFile:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "has_disk"),
    [("qwen3", True), ("gemma3", True), ("gemma3", False)],
    ids=["qwen3-file", "gemma3-file", "gemma3-full disk"],
)
def test_sequences_that_were_swapped_out_get_the_tokens_that_they_get_alone(
    name: str, has_disk: bool, swapped_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full disk they run again: their prompts in chunks, their answers step by step."""
    if not has_disk:
        monkeypatch.setattr(SwapFile, "write", fail)
    requests = crowd(3)
    with engine_of(name) as eager, captured_engine(name, *SMALL) as engine:
        expected = [what(request.submit(eager).result(SECONDS)) for request in requests]
        assert answers(engine, requests) == expected
        assert len(swapped_out) > 1
        assert max(swapped_out) > 24  # after tokens of an answer
        assert_all_pages_return(engine)


@torch.inference_mode()
def assert_all_pages_return(engine: Engine) -> None:
    admission = engine._queue.batching._admission  # type: ignore[attr-defined]  # passes of programs
    assert isinstance(admission, CacheAdmission)
    assert engine.status() == []
    engine._queue.run_alone("test", lambda: None)  # the last sequences have left
    admission.clear_prefix_cache()
    assert [table.num_free for table in admission.pages.tables] == [table.num_pages for table in admission.pages.tables]


def after_thoughts(text: str) -> AnswerStops:
    """Return what ends a text at any of its characters, but behind the first six, which are thoughts, and a tag."""
    known = ToolFormat("thinking", reasoning_open="<|open|>", reasoning_close=text[6:9])
    return AnswerStops(AnswerParser(known, (), "<|open|>", stops=[*text.replace(" ", "")]), [])


@pytest.mark.parametrize("seed", range(2))
def test_stops_and_cancels_while_others_are_swapped_out_end_nobody_else(
    seed: int, swapped_out: list[int], tmp_path: Path
) -> None:
    """Stop strings of the whole text, and of what is behind thoughts, whose text has them, too."""
    generator, requests = random.Random(seed), crowd(seed)
    folder = str(copytree(TINY / "qwen3", tmp_path / "with text"))
    add_tokenizer(Path(folder))
    with engine_of(folder) as eager, captured_engine(folder, *SMALL) as engine:
        alone = [request.submit(eager).result(SECONDS) for request in requests]
        stops = [generator.choice((None, *(part for part in (one.text[24:28],) if part))) for one in alone]
        given: list[Any] = [[stop] if stop else [] for stop in stops]
        given[::5] = [partial(after_thoughts, one.text) for one in alone[::5]]
        pairs = list(zip(requests, given, strict=True))
        stopped = [one.submit(eager, stop=stop).result(SECONDS) for one, stop in pairs]
        for whole, found in zip(alone[::5], stopped[::5], strict=True):
            behind = whole.text.partition(whole.text[6:9])[2].lstrip()
            assert (found.finish_reason, found.stop_reason) == ("stop", behind[0])
            assert found.text == whole.text[: len(whole.text) - len(behind) + 1]
        with engine.holding_back():
            handles = [one.submit(engine, stop=stop) for one, stop in pairs]
        cancelled = generator.sample(range(len(handles)), 3)
        for at in cancelled:
            handles[at].event(generator.randrange(6))
            handles[at].cancel()
        for at, (handle, one) in enumerate(zip(handles, stopped, strict=True)):
            found = handle.result(SECONDS)
            if at in cancelled:
                assert found.token_ids == one.token_ids[: len(found.token_ids)]
            else:
                assert what(found) == what(one)
        assert swapped_out
        assert_all_pages_return(engine)
