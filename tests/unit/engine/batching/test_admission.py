"""Who gets a row and pages, who waits, and who is swapped out: over caches of one number for each position."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.comparisons import steps_of
from support.engine_fakes import MODELS, HashRunner, Moving, SteppedQueue, do_nothing

from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.batching.host_decode_loop import HostDecodeLoop
from graphcore.engine.request import Request
from graphcore.kvcache.page_allocator import SwappedSequence
from graphcore.kvcache.swap_file import SwapFile
from graphcore.progress import ignore_progress
from graphcore.streaming.policy import Resident
from graphcore.tokenizer.text_stream import StopStrings


class Served:
    """A queue over `HashRunner`: rows for three sequences, pages of four positions, chunks of eight tokens.

    Attributes:
        tokens_run: tokens that passes have run.
        swapped: first token of each request that was swapped out, in order.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "full", tokens: int = 32, **sizes: Any
    ) -> None:
        self.runner: Any = HashRunner(name, tokens, **sizes)
        self.admission = CacheAdmission.of(self.runner, folder)
        self.batching = ContinuousBatching(self.runner, HostDecodeLoop(self.runner), self.admission)
        self.queue = SteppedQueue(self.batching, 100, lambda: None, ignore_progress, lambda: None)
        self.tokens_run, self.swapped = 0, list[int]()
        run, swap_out = self.runner._run, Request.swap_out

        def counted(program: Any) -> None:
            self.tokens_run += sum(len(ids) for _, ids, _, _ in program.runs)
            run(program)

        def noted(request: Request) -> None:
            self.swapped.append(request.prompt_ids[0])
            swap_out(request)

        self.runner._run = counted
        monkeypatch.setattr(Request, "swap_out", noted)

    def submit(self, prompt: Sequence[int], tokens: int, **settings: Any) -> Request:
        request = Request(tuple(prompt), tokens, frozenset(), None, StopStrings([]), **settings)
        self.queue.submit([request], "submit", waits=False)
        return request

    def finish(self) -> None:
        while self.queue.step():
            continue

    def check(self, *requests: Request) -> None:
        """Check that requests have the answers that they have alone."""
        for request in requests:
            expected = self.runner.alone(request.prompt_ids, request.max_new_tokens, request.end_ids)
            assert (request.token_ids, request.finish_reason) == expected


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *given, **sizes: Served(tmp_path / "swapped", monkeypatch, *given, **sizes)


def prompt(first: int, length: int) -> list[int]:
    return [first, *[9] * (length - 1)]


def test_a_prompt_waits_for_pages_that_earlier_prompts_have_not_taken_yet_and_keeps_its_place(serve: Any) -> None:
    """Eight pages: the first prompt needs six of them, but has two after its first pass."""
    served = serve()
    first, second, third = (served.submit(prompt(at, length), 1) for at, length in ((1, 23), (2, 13), (3, 2)))
    served.queue.step()
    assert [request.cache_row is not None for request in (first, second, third)] == [True, False, False]
    served.queue.step()
    assert list(served.batching.running) == [first]
    served.finish()
    assert served.swapped == []
    served.check(first, second, third)


def test_requests_behind_one_that_waits_for_pages_do_not_pass_it(serve: Any) -> None:
    served = serve()
    requests = [served.submit(prompt(at, length), 3) for at, length in ((1, 20), (2, 20), (3, 2))]
    served.queue.step()
    assert list(served.batching.running) == requests[:1]  # the third would fit
    served.finish()
    served.check(*requests)


def test_the_newest_request_is_swapped_out_and_the_oldest_comes_back_first(serve: Any) -> None:
    """Three answers of 20 tokens need 18 pages, and there are eight."""
    served = serve()
    requests = [served.submit(prompt(at, 3), 20) for at in (1, 2, 3)]
    served.finish()
    assert served.swapped[:2] == [3, 2]
    assert 1 not in served.swapped
    ends = [request._last for request in requests]
    assert ends == sorted(ends)
    served.check(*requests)


def test_a_request_that_waits_is_not_admitted_before_those_that_are_swapped_out(serve: Any) -> None:
    served = serve()
    requests = [served.submit(prompt(at, 3), 20) for at in (1, 2, 3)]
    while not served.swapped:
        served.queue.step()
    last = served.submit(prompt(4, 2), 1)  # a row is free for it, and soon a page
    while last.cache_row is None and not last.has_ended:
        assert requests[2].cache_row is None or not served.admission._swapped
        served.queue.step()
    assert not served.admission._swapped
    served.finish()
    served.check(*requests, last)


def test_a_disk_that_is_full_costs_time_and_no_token(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()

    def full(kept: SwappedSequence, folder: Path) -> SwapFile:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SwapFile, "write", full)
    requests = [served.submit(prompt(at, 3), 20) for at in (1, 2, 3)]
    served.finish()
    assert served.swapped
    assert served.tokens_run > sum(len(request.ids) - 1 for request in requests)
    served.check(*requests)


@pytest.mark.parametrize("fault", ["the disk is full", "the file is lost"])
def test_a_request_that_went_on_from_an_answer_never_runs_again_with_other_bits(
    fault: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy stays in memory, or, if it was in a file that is lost, the request fails: others go on."""
    served = serve()
    chat = served.submit(prompt(5, 3), 6, reuses_cache=True)
    served.finish()
    served.check(chat)
    first = served.submit(prompt(1, 3), 20)
    second = served.submit([*chat.ids, 4], 14, reuses_cache=True)
    if fault == "the disk is full":
        monkeypatch.setattr(served.admission, "_folder", Path("/dev/null/swapped"))
    while second not in served.admission._swapped:
        assert served.queue.step()
    stored = served.admission._swapped[second]
    assert second.cached == len(chat.ids) - 1
    assert isinstance(stored, SwappedSequence if fault == "the disk is full" else SwapFile)
    if isinstance(stored, SwapFile):
        stored._file.truncate(0)
    ran = served.tokens_run
    before, left = first.num_uncomputed + 20 - len(first.token_ids), 14 - len(second.token_ids)
    served.finish()
    served.check(first)
    if fault == "the disk is full":
        assert (second.finish_reason, len(second.token_ids)) == ("length", 14)
        assert served.tokens_run - ran <= before + left
    else:
        with pytest.raises(OSError, match="lost its end"):
            second.output.wait_to_end(0.0)


def test_a_file_that_another_process_could_not_write_or_read_is_used_by_none(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of a ring then run the tokens again, or would run other steps than their neighbours."""
    written, read = list[SwapFile](), list[SwapFile]()
    write, read_back = SwapFile.write, SwapFile.read

    def noted_write(kept: SwappedSequence, folder: Path) -> SwapFile:
        written.append(write(kept, folder))
        return written[-1]

    def noted_read(file: SwapFile) -> SwappedSequence:
        read.append(file)
        return read_back(file)

    monkeypatch.setattr(SwapFile, "write", noted_write)
    monkeypatch.setattr(SwapFile, "read", noted_read)
    for could_write, reads in ((False, 0), (True, 1)):
        served = serve()
        answers = iter([could_write])  # then False, of what is read
        served.admission._agree = lambda _is_true, answers=answers: next(answers, False)
        requests = [served.submit(prompt(at, 3), 20) for at in (1, 2, 3)]
        served.finish()
        served.check(*requests)
        assert served.tokens_run > sum(len(one.ids) - 1 for one in requests), "no token ran again"
        assert written
        assert len(read) == reads
        assert all(file._file.closed for file in written)


def test_files_are_closed_when_their_requests_come_back_or_end(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files, write = list[SwapFile](), SwapFile.write.__func__  # type: ignore[attr-defined]

    def note(cls: type[SwapFile], kept: SwappedSequence, folder: Path) -> SwapFile:
        files.append(write(cls, kept, folder))
        return files[-1]

    monkeypatch.setattr(SwapFile, "write", classmethod(note))
    served = serve()
    requests = [served.submit(prompt(at, 3), 20) for at in (1, 2, 3)]
    while len(served.admission._swapped) < 2:
        served.queue.step()
    requests[2].end("interrupted")  # while it is swapped out
    served.queue.step()
    assert [file._file.closed for file in files] == [True, False]
    served.finish()
    assert all(file._file.closed for file in files)
    served.check(*requests[:2])


def test_prompts_that_begin_alike_run_their_common_pages_once(serve: Any) -> None:
    """Later ones wait for the first, chunk by chunk, although all three came together and a pass has room for all."""
    served = serve(tokens=96)
    served.runner.prompt_tokens = 100
    common = prompt(1, 24)
    requests = [served.submit([*common, *[at] * 4], 1) for at in (2, 3, 4)]
    served.finish()
    assert served.tokens_run == 24 + 3 * 4
    assert [request.cached for request in requests] == [0, 24, 24]
    served.check(*requests)


def test_a_prompt_does_not_wait_for_an_earlier_one_that_cannot_help_it(serve: Any) -> None:
    served = serve(tokens=96)
    first, second = served.submit(prompt(1, 30), 1), served.submit(prompt(2, 3), 1)
    served.runner.prompt_tokens = 11
    served.queue.step()
    assert (first.num_computed, second.num_computed) == (8, 3)
    assert second.has_ended
    served.finish()
    served.check(first, second)


@pytest.mark.parametrize(("room", "computed"), [(8, [8, 0, 0]), (16, [8, 8, 0]), (24, [8, 8, 8])])
def test_a_pass_takes_chunks_of_the_oldest_prompts_up_to_its_room(room: int, computed: list[int], serve: Any) -> None:
    served = serve(tokens=96)
    served.runner.prompt_tokens = room
    requests = [served.submit(prompt(at, 20), 1) for at in (1, 2, 3)]
    served.queue.step()
    assert [request.num_computed for request in requests] == computed
    served.finish()
    served.check(*requests)


def test_a_long_prompt_takes_no_pass_from_those_that_decode(serve: Any) -> None:
    served = serve(tokens=96)
    first = served.submit(prompt(1, 2), 12)
    served.queue.step()
    second = served.submit(prompt(2, 30), 1)
    for count in range(2, 6):
        served.queue.step()
        assert len(first.token_ids) == count
    assert second.has_ended
    served.finish()
    served.check(first, second)


@pytest.mark.parametrize("name", MODELS)
def test_as_many_requests_as_rows_run_side_by_side_in_a_pool_for_all(name: str, serve: Any) -> None:
    """A ring frees what its window has passed: its pool has a window for each sequence, and a chunk once."""
    served = serve(name, tokens=192, context=64)
    requests = [served.submit(prompt(at, 20), 40) for at in (1, 2, 3)]
    served.finish()
    assert served.swapped == []
    served.check(*requests)


def test_an_error_in_a_pass_leaves_nothing_that_later_prompts_could_find(serve: Any) -> None:
    served = serve(tokens=96)
    done = served.submit(prompt(1, 17), 2, reuses_cache=True)
    served.finish()
    running = served.submit(prompt(1, 18), 9, reuses_cache=True)
    served.queue.step()

    def fail() -> None:
        raise ZeroDivisionError

    served.runner.after_program = fail
    served.queue.step()
    served.runner.after_program = do_nothing
    assert running.finish_reason == "error"
    again = served.submit([*done.ids, 3], 5)
    served.finish()
    assert again.cached == 0
    served.check(done, again)


def test_an_error_when_a_request_leaves_loses_no_page(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have no memory for the states of a chat; its row is not the next one that is given out."""
    served = serve("states", has_kinds=False)
    other = served.submit(prompt(1, 2), 9)
    chat = served.submit(prompt(2, 17), 2, reuses_cache=True)

    def fail(*_: object) -> None:
        if chat.has_ended:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(served.runner.pages, "copy_states", fail)
        served.finish()
    assert (chat.finish_reason, other.finish_reason) == ("length", "error")
    assert not any(held for table in served.runner.pages.tables for held in table.rows)
    whole = served.submit(prompt(3, 28), 4)  # needs all pages
    served.finish()
    served.check(whole)


def test_an_error_when_a_request_is_admitted_loses_no_page(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have no memory for the copy of a page that prompts share in part."""
    served = serve(tokens=96)
    done = served.submit(prompt(1, 17), 1)
    served.finish()
    (table,) = served.runner.pages.tables

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(table, "copies", fail)
        again = served.submit([*prompt(1, 14), 3, 3, 3], 2)
        served.queue.step()
    served.finish()
    served.check(done, again)
    served.admission.clear_prefix_cache()
    assert table.num_free == table.num_pages


def test_an_aborted_pass_leaves_no_states_that_a_chat_could_go_on_from(serve: Any) -> None:
    served = serve("states", tokens=96, has_kinds=False)
    chat = served.submit(prompt(1, 5), 9, reuses_cache=True)
    for _ in range(3):
        served.queue.step()

    def abandon() -> None:
        chat.output.readers.are_gone = True

    served.runner.policy, served.runner.after_program = Moving(), abandon
    served.queue.step()
    served.runner.policy, served.runner.after_program = Resident(), do_nothing
    assert (chat.finish_reason, len(chat.token_ids)) == ("interrupted", 3)
    again = served.submit([*chat.ids, 4], 5, reuses_cache=True)
    served.finish()
    served.check(again)


def test_a_prompt_whose_first_page_was_evicted_while_it_ran_is_cached_when_it_ends(serve: Any) -> None:
    """Eight pages. The tree has the first page from another prompt, which begins alike for less than a chunk."""
    served = serve("states", has_kinds=False)
    first, second = served.submit([*[5] * 4, *[6] * 8], 4), served.submit([*[5] * 4, *[8] * 8], 20)
    served.finish()
    assert (second.finish_reason, served.swapped) == ("length", [])
    again = served.submit([*second.prompt_ids, 9], 2)
    served.finish()
    assert again.cached == 8
    served.check(first, second, again)


def test_the_chunks_of_a_long_prompt_cost_the_prefix_cache_as_much_as_those_of_a_short_one(serve: Any) -> None:
    """In bytecode instructions: a chunk adds its own pages, and does not visit those before it."""
    served, costs = serve(context=512, tokens=1024), list[int]()
    keep = served.admission.cache_prompt
    served.admission.cache_prompt = lambda request: costs.append(steps_of(lambda: keep(request)))
    request = served.submit(prompt(1, 510), 1)
    served.finish()
    assert len(costs) == 64
    assert max(costs[1:-1]) == min(costs[1:-1])
    again = served.submit([*request.prompt_ids, 3], 1)
    served.finish()
    assert again.cached == 508  # three tokens are the fewest of a chunk


def test_a_prompt_that_runs_again_is_cached_from_its_start_again(serve: Any) -> None:
    """A copy that could not be written: the row has the states after eight tokens, and the tree had 24 before."""
    served = serve("states", tokens=96)
    admission = served.admission
    request = Request(tuple(prompt(1, 24)), 1, frozenset(), None, StopStrings([]))
    assert admission.admit(request)
    for computed in (8, 16, 24):
        assert admission.reserve(request, 8, None)
        request.num_computed = computed
        admission.cache_prompt(request)
    path = admission._prefixes.path(request.prompt_ids)
    assert [node.end for node in path if node.snapshot is not None] == [16, 24]
    for node in path:
        admission._prefixes._drop_snapshot(node)
    request.num_computed = 8
    admission.cache_prompt(request)
    assert [node.end for node in path if node.snapshot is not None] == [8]
