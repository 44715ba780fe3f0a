"""Sequences of forward states beside rows of requests: each goes on from its own tokens, wherever they were kept."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.cases import in_case
from support.engine_fakes import MODELS, HashRunner

from graphcore.kvcache.forward_sequences import ForwardSequencePool, ForwardSequences

CHUNK, CONTEXT = 8, 32


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Sequences:
    """States of several sequences and rows of requests over one pool.

    Attributes:
        pool: sequences of the states.
        num_copied: number of times that a sequence was swapped out.
    """

    def __init__(self, name: str, tokens: int) -> None:
        self.runner: Any = HashRunner(name, tokens)
        self.pool = ForwardSequencePool(self.runner.pages)
        self.num_copied = 0
        swap_out = self.pool._swap_out

        def counted(one: Any) -> None:
            self.num_copied += one.swapped is None
            swap_out(one)

        self.pool._swap_out = counted  # type: ignore[method-assign]

    def extend(self, state: ForwardSequences, known: list[list[int]], more: list[list[int]]) -> None:
        """Run more tokens of each sequence, and compare the tokens that follow with those of lists."""
        begin, end = len(known[0]), len(known[0]) + len(more[0])
        with self.pool.in_rows(state, len(known), begin, end):
            for row, (ids, new) in enumerate(zip(known, more, strict=True)):
                assert self.runner.pages.reserve(row, begin, end)
                assert self.runner._run_row(row, new, begin, 0) == self.after([*ids, *new])
        for ids, new in zip(known, more, strict=True):
            ids += new

    def after(self, ids: list[int]) -> int:
        """Return the token after a sequence whose tokens all have the same kind."""
        self.runner.has_kinds = False
        (token,), _ = self.runner.alone(ids, 1, frozenset())
        return int(token)

    def check_counts(self, states: list[ForwardSequences]) -> None:
        """Check that each page is free or one row's or one state's."""
        for index, table in enumerate(self.runner.pages.tables):
            held = [one.pages[index] for state in states for one in state.rows if one.pages]
            used = [page for pages in (*table.rows, *held) for page in pages.values()]
            assert len(used) == len(set(used))
            assert table._refs == dict.fromkeys(used, 1)
            assert sorted([*used, *table._free]) == list(range(1, 1 + table.num_pages))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [32, 72, 160])
def test_states_and_requests_in_any_order_go_on_from_their_own_tokens(name: str, tokens: int) -> None:
    """The smallest pool holds one sequence; there states are copied, and in the largest none is."""
    generator, served = random.Random(tokens), Sequences(name, tokens)
    runner = served.runner
    states: list[tuple[ForwardSequences, list[list[int]]]] = []
    rows: dict[int, list[int]] = {}
    for _ in range(120):
        kind = generator.choice(("extend", "extend", "extend", "new", "drop", "request", "request", "end"))
        if kind == "new" and len(states) < 3:
            states.append((ForwardSequences(served.pool), [[] for _ in range(generator.choice((1, 2)))]))
        elif kind == "drop" and states:
            state, _ = states.pop(generator.randrange(len(states)))
            state.drop()
        elif kind == "extend" and states:
            state, known = generator.choice(states)
            count = min(generator.randint(1, CHUNK), CONTEXT - len(known[0]))
            is_enough = len(known) * -(-(len(known[0]) + count) // 4) * 4 <= tokens
            if count and is_enough:
                served.extend(state, known, [[generator.randrange(9) for _ in range(count)] for _ in known])
        elif kind == "request":
            row = generator.randrange(3)
            ids = rows.get(row, [])
            new = [generator.randrange(9) for _ in range(min(generator.randint(1, CHUNK), CONTEXT - len(ids)))]
            if new and runner.pages.reserve(row, len(ids), len(ids) + len(new)):
                assert runner._run_row(row, new, len(ids), 0) == served.after([*ids, *new])
                rows[row] = [*ids, *new]
        elif kind == "end" and rows:
            row = generator.choice(list(rows))
            runner.pages.free(row)
            del rows[row]
        served.pool._give_back_dropped()
        served.check_counts([state for state, _ in states])
    if tokens < 160 and runner.pages.tables:
        assert served.num_copied > 0
    elif name in ("full", "states", "recurrent"):  # a ring's pool is smaller
        assert served.num_copied == 0
    for state, _ in states:
        state.drop()
    for row in rows:
        runner.pages.free(row)
    served.pool._give_back_dropped()
    assert all(table.num_free == table.num_pages for table in runner.pages.tables)


@pytest.mark.parametrize("tokens", [64, 160])
@pytest.mark.parametrize("name", MODELS)
def test_a_call_that_fails_leaves_states_and_rows_as_they_were(name: str, tokens: int) -> None:
    """In the small pool the state is copied out first, because the request's row has half of the pages."""
    served = Sequences(name, tokens)
    runner, state, known = served.runner, ForwardSequences(served.pool), [[1, 2, 3], [4, 5, 6]]
    served.extend(state, [[], []], known)
    assert runner.pages.reserve(0, 0, 8)
    runner._run_row(0, [7] * 8, 0, 0)

    def fail() -> None:
        with served.pool.in_rows(state, 2, 3, 11):
            for row in range(2):
                runner.pages.reserve(row, 3, 11)
                runner._run_row(row, [8] * 8, 3, 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    served.check_counts([state])
    assert runner.pages.reserve(0, 8, 9)
    assert runner._run_row(0, [1], 8, 0) == served.after([*[7] * 8, 1])
    served.extend(state, known, [[7, 7], [1, 2]])


def test_a_call_without_memory_for_states_takes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the copies fails: of the rows' states, before the call, or of the sequences', behind it."""
    served = Sequences("states", 160)
    assert served.runner.pages.reserve(0, 0, CHUNK)
    before = [dict(table.rows[0]) for table in served.runner.pages.tables]
    state, known = ForwardSequences(served.pool), [list[int](), list[int]()]
    served.extend(state, known, [[1, 2], [3, 4]])
    evictable = [served.pool.num_evictable(table) for table in served.runner.pages.tables]
    kind = type(served.runner.pages.states[0])
    copy_out = kind.copy_out
    num_copies = 2 * 2 * len(served.runner.pages.states)  # of two rows, before and behind the call
    for failing in range(num_copies):
        left = iter(range(failing))

        def copied(cache: Any, row: int, left: Iterator[int] = left) -> Any:
            if next(left, None) is None:
                raise MemoryError
            return copy_out(cache, row)

        with in_case(failing), monkeypatch.context() as patch:
            patch.setattr(kind, "copy_out", copied)
            with pytest.raises(MemoryError):
                served.extend(state, known, [[5], [6]])
            assert [table.rows[0] for table in served.runner.pages.tables] == before
            assert [served.pool.num_evictable(table) for table in served.runner.pages.tables] == evictable
            served.check_counts([state])
    served.extend(state, known, [[5], [6]])


def test_the_state_that_was_used_last_is_swapped_out_last_and_no_more_than_needed() -> None:
    served = Sequences("full", 64)
    states = [ForwardSequences(served.pool) for _ in range(3)]
    known = [[[]] for _ in states]
    for state, ids in zip(states, known, strict=True):
        served.extend(state, ids, [[1] * 8])
    served.extend(states[0], known[0], [[2]])  # two pages become three
    assert served.num_copied == 0
    assert served.runner.pages.reserve(0, 0, 32)  # eight of sixteen pages, of which nine are free
    assert served.runner.pages.reserve(1, 0, 8)
    assert [state.rows[0].swapped is None for state in states] == [True, False, True]
    for state, ids in zip(states, known, strict=True):
        served.extend(state, ids, [[3]])
