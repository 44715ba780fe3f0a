"""Which steps of a decode program are captured together where weights move, and what captures hand to one another."""

from collections.abc import Collection

import pytest
import torch
from support.fake_cuda import FakeCuda
from tiny_graph import FULL, SLIDING, builder_of, feed, model_of, random_ids

from graphcore.graph.builder import GraphBuilder
from graphcore.graph.gpu.capture import CapturedStep
from graphcore.graph.gpu.partition import cut
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
    expected, found = plain.decode(2, is_greedy=True), cut_up.decode(2, is_greedy=True)
    cuda = FakeCuda.install(monkeypatch)
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
    assert len({pool for pool, *_ in cuda.captures}) == 1
    assert len(cuda.graphs) == cut_up.captures.num_graphs == len(captures)
    assert len({tuple(tensor.data_ptr() for tensor in step.handed) for step in captures}) == 1


@pytest.mark.parametrize(
    ("streamed", "expected"),
    [((), ["0 1 2 3 4 5 0"]), ((2,), ["0 1", "2", "3 4 5 0"]), ((HEAD,), ["0 1 2 3 4", "5 0"])],
)
def test_the_choice_on_the_device_is_in_the_last_piece_with_the_head(
    streamed: tuple[int, ...], expected: list[str]
) -> None:
    builder = cut_builder(())
    builder.kind = "captured"
    (step,) = builder.sample(2, has_top_k_top_p=True).steps
    assert isinstance(step, CapturedStep)
    pieces = cut(step.steps, streamed)
    assert [" ".join(str(step.group) for step in piece.steps) for piece in pieces] == expected


def set_token(state: StepState, token_ids: list[int], start: int) -> None:
    state.token_ids.copy_(torch.tensor(token_ids)[:, None])
    state.span.starts.fill_(start)
    state.span.counts.fill_(1)
