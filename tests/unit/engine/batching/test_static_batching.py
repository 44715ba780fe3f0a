"""Batches that begin and end as a whole: who is in one, when the next begins, and what a row holds of the last."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine_fakes import VOCAB, SteppedQueue, one_hot

from graphcore.engine.batching.static import StaticBatching
from graphcore.engine.model_runner import RunnerSizes
from graphcore.engine.request import Request
from graphcore.errors import ConfigError
from graphcore.kernels.backend import TorchBackend
from graphcore.progress import ignore_progress
from graphcore.streaming.policy import Policy, Resident
from graphcore.tokenizer.text_stream import StopStrings

SIZES, CPU = RunnerSizes(3, 8, VOCAB, 40, 40), torch.device("cpu")


def next_token(ids: Sequence[int]) -> int:
    return sum((at + 3) * token for at, token in enumerate(ids, 1)) % VOCAB


@dataclass
class FakeRunner:
    """A runner whose cache of a row is the list of its tokens, of which the next token is a sum.

    Attributes:
        extended: rows of each call of `extend`.
        lent: arguments of each call of `lend_cache`.
    """

    needs_equal_lengths: bool = True
    rows: list[list[int]] = field(default_factory=list)
    extended: list[list[list[int]]] = field(default_factory=list)
    policy: Policy = field(default_factory=Resident)
    sizes: RunnerSizes = SIZES
    device: torch.device = CPU
    backend: TorchBackend = field(default_factory=TorchBackend)
    lent: list[tuple[list[int], int]] = field(default_factory=list)

    def width(self, num_sequences: int) -> int:
        return num_sequences

    def reusable(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        goes_on = len(prompt) > len(cached) and list(prompt[: len(cached)]) == list(cached)
        return len(cached) if goes_on and len(self.rows[0]) == len(cached) else 0

    def extend(self, rows: list[list[int]], starts: list[int], on_progress: object) -> torch.Tensor:
        self.extended.append([list(ids) for ids in rows])
        kept = self.rows if any(starts) else [[] for _ in rows]
        assert [len(ids) for ids in kept] == starts
        self.rows = [[*held, *ids] for held, ids in zip(kept, rows, strict=True)]
        return one_hot(list(map(next_token, self.rows)))

    def program(self, phase: str, width: int) -> Any:
        assert width == len(self.rows)
        state = SimpleNamespace(logits=None, put_rows=lambda ids, lasts: inputs.append((ids, lasts)))
        inputs: list[tuple[list[list[int]], list[int]]] = []

        def replay() -> None:
            ids, lasts = inputs.pop()
            for held, one, last in zip(self.rows, ids, lasts, strict=True):
                assert not one or len(held) == last
                held += one
            state.logits = one_hot(list(map(next_token, self.rows)))

        return SimpleNamespace(state=state, steps=[SimpleNamespace(group=0, replay=replay)])

    def lend_cache(self, rows: Sequence[int], tokens: int) -> Callable[[], None]:
        kept, self.rows = self.rows, []
        self.lent.append((list(rows), tokens))

        def restore() -> None:
            self.rows = kept if rows else [[0] * len(held) for held in kept]  # the other calls' tokens

        return restore


def served(**given: Any) -> tuple[SteppedQueue, Any]:
    runner: Any = FakeRunner(**given)
    return SteppedQueue(StaticBatching(runner), 100, lambda: None, ignore_progress, lambda: None), runner


def submit(queue: SteppedQueue, prompt: Sequence[int], tokens: int, **settings: Any) -> Request:
    request = Request(list(prompt), tokens, frozenset(), None, StopStrings([]), **settings)
    queue.submit([request], "submit", waits=False)
    return request


def finish(queue: SteppedQueue) -> None:
    while queue.step():
        continue


def alone(request: Request) -> list[int]:
    ids = list(request.prompt_ids)
    for _ in range(request.max_new_tokens):
        ids.append(next_token(ids))
    return ids[len(request.prompt_ids) :]


@pytest.mark.parametrize(
    ("needs_equal_lengths", "batches"),
    [(True, [[2], [3], [2], [3, 3], [2]]), (False, [[2, 3, 2], [3, 3, 2]])],
)
def test_a_batch_takes_the_first_requests_that_may_begin_together_and_no_later_ones(
    needs_equal_lengths: bool, batches: list[list[int]]
) -> None:
    queue, runner = served(needs_equal_lengths=needs_equal_lengths)
    requests = [submit(queue, [at] * length, 1 + at % 4) for at, length in enumerate((2, 3, 2, 3, 3, 2))]
    finish(queue)
    assert [[len(ids) for ids in batch] for batch in runner.extended] == batches
    assert [request.token_ids for request in requests] == list(map(alone, requests))


def test_the_next_batch_begins_when_all_of_the_last_have_ended_and_ended_rows_run_no_token() -> None:
    queue, runner = served()
    first, second, third = (submit(queue, [at, 5], tokens) for at, tokens in ((1, 2), (2, 5), (3, 3)))
    late = submit(queue, [4, 5], 1)
    for _ in range(5):
        assert not late.token_ids
        queue.step()
    assert [len(held) for held in runner.rows] == [3, 6, 4]
    finish(queue)
    for request in (first, second, third, late):
        assert request.token_ids == alone(request)
    assert late.batch == 1
    assert second.batch == 3


def test_a_chat_goes_on_from_its_own_last_answer_and_nobody_else_does() -> None:
    queue, runner = served()
    first = submit(queue, [1, 2, 3], 3, reuses_cache=True)
    finish(queue)
    second = submit(queue, [*first.ids, 4], 2, reuses_cache=True)
    finish(queue)
    assert runner.extended[-1] == [[first.ids[-1], 4]]  # the last token of an answer has not run
    assert second.cached == len(first.ids) - 1
    other = submit(queue, [9] * (len(second.ids) - 2), 2)  # as many tokens run as the chat has run
    finish(queue)
    again = submit(queue, [*second.ids, 4], 2, reuses_cache=True)
    finish(queue)
    assert again.cached == 0  # the row holds another request's tokens since
    for request in (first, second, other, again):
        assert request.token_ids == alone(request)


@pytest.mark.parametrize("what", ["beside another", "after a loan", "after an error", "after an abort"])
def test_tokens_that_a_row_may_not_hold_any_more_run_again(what: str) -> None:
    queue, _ = served()
    first = submit(queue, [1, 2, 3], 3, reuses_cache=True)
    finish(queue)
    if what == "after a loan":
        queue.batching.lend_cache()()
    elif what in ("after an error", "after an abort"):
        submit(queue, [1, 2], 9)
        queue.step()
        if what == "after an error":
            queue.batching.fail(ZeroDivisionError())
        else:
            queue.batching.give_up()
    prompt = [*first.ids, 4]
    chats = [submit(queue, prompt, 2, reuses_cache=True) for _ in range(2 if what == "beside another" else 1)]
    finish(queue)
    assert [chat.cached for chat in chats] == [0] * len(chats)
    for chat in chats:
        assert chat.token_ids == alone(chat)
    last = submit(queue, [*chats[0].ids, 4], 2, reuses_cache=True)
    finish(queue)
    assert last.cached == (0 if what == "beside another" else len(chats[0].ids) - 1)


def test_a_loan_keeps_the_rows_of_a_batch_whose_prompts_have_run() -> None:
    queue, runner = served()
    requests = [submit(queue, [at, 5], 4) for at in (1, 2)]
    queue.step()
    queue.batching.lend_cache()()
    assert runner.lent == [([0, 1], 2)]
    finish(queue)
    assert [request.token_ids for request in requests] == list(map(alone, requests))
    queue.batching.lend_cache()()
    assert runner.lent[-1] == ([], 0)


def test_requests_end_with_an_error_or_as_interrupted_and_the_next_batch_runs() -> None:
    queue, _ = served()
    failed, interrupted, last = (submit(queue, [1] * length, 4) for length in (2, 3, 4))
    queue.step()
    queue.batching.fail(ConfigError("broken"))
    assert not queue.batching.running
    queue.step()
    queue.batching.give_up()
    finish(queue)
    with pytest.raises(ConfigError, match="broken"):
        failed.output.wait_to_end(0.0)
    assert (interrupted.finish_reason, interrupted.token_ids) == ("interrupted", alone(interrupted)[:1])
    assert (last.finish_reason, last.token_ids) == ("length", alone(last))
