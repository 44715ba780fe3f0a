"""A choosing step takes each row's own settings, and rows that are idle choose nothing."""

import pytest
import torch
from support.engine_fakes import changed, draw_of

from graphcore.graph.gpu.sampling import MOST_ENDS, RowSettings, SamplingBuffers, SamplingRows, choose_step
from graphcore.graph.state import StepState
from graphcore.kernels.ops.draw import choose_tokens

pytestmark = pytest.mark.thorough

CPU, VOCAB = torch.device("cpu"), 300
DRAWS = [
    draw_of(seed=(1 << 64) - 3, position=9, temperature=0.8, top_p=0.7),
    draw_of(seed=5, position=4, temperature=0.0),
    draw_of(seed=-6, position=70, temperature=2.0, top_k=9),
    draw_of(seed=1 << 63, position=1, temperature=1.0, min_p=0.1, repetition_penalty=1.9),
]


def test_rows_choose_by_their_own_settings_limits_and_ends() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    history = [3, 4, int(logits[3].argmax())]
    choosing, state = SamplingBuffers.allocate(5, VOCAB, CPU), StepState.empty(5, 1, CPU)
    choosing.seen.fill_(1)  # an earlier sequence's
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[history] = True
    expected = choose_tokens(logits[:4], [*DRAWS[:3], changed(DRAWS[3], seen=seen)])
    ends = ({expected[1]}, {expected[0]}, {expected[2], 5}, ())
    for row, (draw, left, each) in enumerate(zip(DRAWS, (7, 1, 7, 7), ends, strict=True)):
        past = history if row == 3 else ()
        choosing.put(row, RowSettings(left, each, draw.params, past))
    state.put_rows([[0]] * 4, [one.position - 1 for one in DRAWS])
    state.logits, state.chosen = logits, torch.full((5,), -9)
    choose_step(state, choosing, "top_k_top_p").replay()
    assert state.chosen.tolist() == [*expected, -9]  # the last row is idle
    assert choosing.report[:, 0].tolist() == [*expected, -1]
    assert state.span.counts.tolist() == [1, 0, 0, 1, 0]  # goes on, last token, end token, goes on, idle
    assert state.span.starts.tolist() == [*[one.position for one in DRAWS], 0]
    assert choosing.seen[3].nonzero()[:, 0].tolist() == sorted({*history, expected[3]})


def test_the_device_knows_as_many_ends_of_a_row_as_it_has_room_for() -> None:
    choosing = SamplingBuffers.allocate(2, VOCAB, CPU)
    choosing.put(0, RowSettings(ends=range(100)))
    choosing.put(1, RowSettings(ends={7}))
    assert choosing.ends[0].tolist() == list(range(MOST_ENDS))
    assert choosing.ends[1].tolist() == [7, *[-1] * (MOST_ENDS - 1)]
    choosing.put(1, RowSettings())
    assert set(choosing.ends[1].tolist()) == {-1}


@pytest.mark.parametrize("phase", ["sample", "top_k_top_p"])
def test_a_row_that_joins_chooses_its_first_token_and_leaves_the_others_alone(phase: str) -> None:
    state = StepState.empty(3, 1, CPU)
    state.put_rows([[11], [], [13]], [4, 0, 6])
    state.logits = torch.full((3, VOCAB), float("nan"))  # of an earlier step, and another row's
    rows = SamplingRows(state, VOCAB)
    for tensor in everything(rows):
        tensor[1] = 1  # an earlier sequence's
    before = [tensor.clone() for tensor in everything(rows)]
    draw = draw_of(
        seed=-6, position=70, temperature=2.0, top_k=9 if phase == "top_k_top_p" else 0, repetition_penalty=1.5
    )
    logits, history = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 3, [5, 8]
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[history] = True
    (token,) = choose_tokens(logits, [changed(draw, seen=seen)])
    rows.begin_after(1, logits, 70, RowSettings(5, {3}, draw.params, history), phase)
    assert (state.token_ids[1].item(), state.span.starts[1].item(), state.span.counts[1].item()) == (token, 70, 1)
    assert (rows.choosing.left[1].item(), rows.choosing.report[1, 0].item()) == (4, token)
    assert rows.choosing.seen[1].nonzero()[:, 0].tolist() == sorted({*history, token})
    for tensor, old in zip(everything(rows), before, strict=True):
        assert torch.equal(tensor[0], old[0])
        assert torch.equal(tensor[2], old[2])


def test_a_row_begins_with_a_token_and_stops() -> None:
    state = StepState.empty(2, 1, CPU)
    state.logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = SamplingRows(state, VOCAB)
    rows.begin(1, 42, 17, RowSettings(left=2))
    assert (state.token_ids[1].item(), state.span.starts.tolist(), state.span.counts.tolist()) == (42, [0, 17], [0, 1])
    step = choose_step(state, rows.choosing, "sample")
    step.replay()
    assert rows.choosing.report[:, 0].tolist() == [-1, state.logits[1].argmax().item()]
    assert (state.span.starts.tolist(), state.span.counts.tolist()) == ([0, 18], [0, 1])
    rows.stop(1)
    step.replay()
    assert rows.choosing.report[:, 0].tolist() == [-1, -1]
    assert state.span.starts.tolist() == [0, 18]


def everything(rows: SamplingRows) -> list[torch.Tensor]:
    """Return all that the rows have, but the logits."""
    state, choosing = rows.state, rows.choosing
    own = [choosing.left, choosing.ends, choosing.report, choosing.numbers, choosing.seeds, choosing.seen]
    return [state.token_ids, state.span.starts, state.span.counts, *own]
