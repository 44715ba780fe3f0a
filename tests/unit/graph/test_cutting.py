"""Which steps of a decode program are captured together where weights move, and what captures hand to one another."""

from collections.abc import Collection
from dataclasses import dataclass

import pytest
import torch
from tiny_graph import CPU, FULL, SLIDING, builder_of, feed, model_of, random_ids

from graphcore.graph import capture
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.capture import CapturedStep
from graphcore.graph.cutting import cut
from graphcore.graph.state import StepState

SPEC = model_of(SLIDING, FULL, SLIDING, FULL)
HEAD = 5  # the group after four layers


def cut_builder(streamed: Collection[int], is_gathered: bool = False) -> GraphBuilder:
    builder = builder_of(SPEC, "eager", batch=2)
    builder.streamed = streamed
    if is_gathered:
        table = builder.decoder.embed_tokens.weight
        builder.decoder.embed_tokens.gather = lambda ids: table[ids]
    return builder


@pytest.mark.parametrize(
    ("streamed", "is_gathered", "expected"),
    [
        ((), False, ["0 1 2 3 4 5 0"]),
        ((2,), False, ["0 1", "2", "3 4 5 0"]),
        ((2, 3), False, ["0 1", "2", "3", "4 5 0"]),
        ((1, 2, 3, 4, HEAD), False, ["0", "1", "2", "3", "4", "5", "0"]),
        ((1, 2, 3, 4, HEAD), True, ["host 0", "1", "2", "3", "4", "5", "0"]),
        ((), True, ["host 0", "1 2 3 4 5 0"]),
        ((HEAD,), False, ["0 1 2 3 4", "5", "0"]),
        ((1, 4), False, ["0", "1", "2 3", "4", "5 0"]),
    ],
)
def test_a_program_is_cut_at_groups_that_move_and_where_the_host_is_asked(
    streamed: tuple[int, ...], is_gathered: bool, expected: list[str]
) -> None:
    steps = cut_builder(streamed, is_gathered).decode(2, is_greedy=True).steps
    pieces = cut(steps, streamed)
    named = [("" if piece.may_capture else "host ") + " ".join(str(s.group) for s in piece.steps) for piece in pieces]
    assert named == expected
    assert [step for piece in pieces for step in piece.steps] == list(steps)


@pytest.mark.parametrize("streamed", [(), (2,), (1, 3), (1, 2, 3, 4, HEAD)])
def test_a_piece_has_the_group_that_moves_for_it_and_no_other_piece_has_one_that_does(
    streamed: tuple[int, ...],
) -> None:
    pieces = cut(cut_builder(streamed).decode(2, is_greedy=True).steps, streamed)
    assert [piece.group for piece in pieces if piece.group in streamed] == list(streamed)


def fake_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay by running the steps, then spoil what a piece left in the state outside of memory of its own."""

    class Graph:
        def __init__(self, step: CapturedStep) -> None:
            self.step = step

        def replay(self) -> None:
            state = self.step.state
            owned = {id(tensor) for tensor in self.step.handed}
            self.step._run()
            for tensor in (state.hidden, *state.ropes):
                if id(tensor) not in owned:
                    tensor.fill_(float("nan"))

    monkeypatch.setattr(CapturedStep, "_capture", lambda step: Graph(step))


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("streamed", [(2,), (1, 3), (1, 2, 3, 4, HEAD)])
def test_captured_pieces_hand_over_in_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch, streamed: tuple[int, ...], is_gathered: bool
) -> None:
    plain, cut_up = cut_builder(()), cut_builder(streamed, is_gathered)
    rows = random_ids(2, 9)
    for builder in (plain, cut_up):
        feed(builder.prefill(2), rows, [0, 0])
    cut_up.kind = "captured"
    monkeypatch.setattr(cut_up, "_block_function", plain._block_function)
    monkeypatch.setattr(cut_up, "_head_function", plain._head_function)
    expected, found = plain.decode(2, is_greedy=True), cut_up.decode(2, is_greedy=True)
    fake_captures(monkeypatch)
    for program in (expected, found):
        set_token(program.state, [row[-1] for row in rows], 9)
    for _ in range(12):
        for program in (expected, found):
            for step in program.steps:
                step.replay()
        assert torch.equal(found.state.logits, expected.state.logits)
        assert torch.equal(found.state.chosen, expected.state.chosen)
    captures = [step for step in found.steps if isinstance(step, CapturedStep)]
    assert len(captures) == len(found.steps) - is_gathered
    assert len({id(step.pool) for step in captures}) == 1
    addresses = {(found.state.hidden.data_ptr(), *[rope.data_ptr() for rope in found.state.ropes])}
    assert addresses == {tuple(tensor.data_ptr() for tensor in step.handed) for step in captures}


def test_warming_a_piece_up_leaves_what_was_handed_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up runs the steps twice; a piece in the middle would otherwise advance its own input three times."""

    class Nothing:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def wait_stream(self, _: object) -> None: ...
        def pool(self) -> str:
            return "pool"

    pools: list[object] = []
    for name in ("Stream", "current_stream", "stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, **_: pools.append(pool) or Nothing())
    state, log = StepState.empty(1, 1, CPU), []
    hidden, pool = torch.ones(4), capture.GraphPool()

    @dataclass
    class Doubling:
        group: int = 1

        def replay(self) -> None:
            log.append(hidden.clone())
            hidden.mul_(2)

    for _ in range(3):
        hidden.fill_(1.0)
        step = CapturedStep(1, state, [Doubling()], CPU, pool, (hidden,))
        runs = iter([step._run, step._run, lambda: None])  # a capture runs nothing
        monkeypatch.setattr(step, "_run", lambda runs=runs: next(runs)())
        step.graph = step._capture()
        assert torch.equal(hidden, torch.ones(4))
    assert len(log) == 6
    assert pools == [None, "pool", "pool"]


def set_token(state: StepState, token_ids: list[int], start: int) -> None:
    state.token_ids.copy_(torch.tensor(token_ids)[:, None])
    state.span.starts.fill_(start)
    state.span.counts.fill_(1)
