"""A choosing step takes each row's own settings, and rows that are idle choose nothing."""

import torch

from graphcore.graph.state import StepState
from graphcore.graph.token_choice import MOST_ENDS, Choosing, Drawing, choose_step
from graphcore.kernels.draw import Draw, choose_tokens

CPU, VOCAB = torch.device("cpu"), 300
DRAWS = [
    Draw(seed=(1 << 64) - 3, position=9, temperature=0.8, top_p=0.7),
    Draw(seed=5, position=4, temperature=0.0),
    Draw(seed=-6, position=70, temperature=2.0, top_k=9),
    Draw(seed=1 << 63, position=1, temperature=1.0, min_p=0.1, repetition_penalty=1.9),
]


def test_rows_choose_by_their_own_settings_limits_and_ends() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    history = [3, 4, int(logits[3].argmax())]
    drawing = Drawing.allocate(5, VOCAB, CPU)
    drawing.seen.fill_(1)  # an earlier run's
    numbers = [(one.temperature, one.top_k, one.top_p, one.min_p, one.repetition_penalty) for one in DRAWS]
    drawing.begin(numbers, [one.seed for one in DRAWS], [(), (), (), history])
    choosing, state = Choosing.allocate(5, CPU, drawing), StepState.empty(5, 1, CPU)
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[history] = True
    expected = choose_tokens(logits[:4], [*DRAWS[:3], Draw(**{**vars(DRAWS[3]), "seen": seen})])
    choosing.begin([7, 1, 7, 7], [{expected[1]}, {expected[0]}, {expected[2], 5}])
    state.put_rows([[0]] * 4, [one.position - 1 for one in DRAWS])
    state.logits, state.chosen = logits, torch.full((5,), -9)
    choose_step(state, choosing, narrows=True).replay()
    assert state.chosen.tolist() == [*expected, -9]  # the last row is idle
    assert choosing.report[:, 0].tolist() == [*expected, -1]
    assert state.span.counts.tolist() == [1, 0, 0, 1, 0]  # goes on, last token, end token, goes on, idle
    assert state.span.starts.tolist() == [*[one.position for one in DRAWS], 0]
    assert drawing.seen[3].nonzero()[:, 0].tolist() == sorted({*history, expected[3]})


def test_the_device_knows_as_many_ends_of_a_row_as_it_has_room_for() -> None:
    choosing = Choosing.allocate(2, CPU)
    choosing.begin([1, 1], [range(100), {7}])
    assert choosing.ends[0].tolist() == list(range(MOST_ENDS))
    assert choosing.ends[1].tolist() == [7, *[-1] * (MOST_ENDS - 1)]
    choosing.begin([1])
    assert set(choosing.ends.flatten().tolist()) == {-1}
