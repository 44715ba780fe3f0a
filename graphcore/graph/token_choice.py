"""Chooses the next token on the device, inside a captured graph: nothing is read back before the next step.

Legend: B rows, V vocab, E end tokens.

    logits -> token, log probability -> next input; a row that has ended has no token in the next step

Everything that differs between rows and runs (end tokens, how many tokens a row may choose, temperature and cuts,
seeds) lies in tensors at fixed addresses, so that one graph serves all of them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphcore.graph.state import StepState

MOST_ENDS = 64
UNLIMITED = 1 << 62
SEEDS = 1 << 64
NEUTRAL = (0.0, 0.0, 1.0, 0.0, 1.0)  # temperature, top_k, top_p, min_p, repetition penalty


@dataclass(frozen=True)
class Drawing:
    """The inputs of drawing a token, besides the logits.

    Attributes:
        numbers: settings of each row, [B, 5] float32: temperature, top_k, top_p, min_p, repetition penalty.
        seeds: [B] int64; what a row draws follows from its seed and the token's position.
        seen: [B, V] uint8, 1 for tokens that the penalty applies to.
    """

    numbers: Tensor
    seeds: Tensor
    seen: Tensor

    @classmethod
    def allocate(cls, batch: int, vocab: int, device: torch.device) -> "Drawing":
        """Return neutral settings for that many rows."""
        numbers = torch.tensor([NEUTRAL] * batch, dtype=torch.float32, device=device)
        seeds = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(numbers, seeds, torch.zeros(batch, vocab, dtype=torch.uint8, device=device))

    def begin(
        self, numbers: Sequence[Sequence[float]], seeds: Sequence[int], histories: Sequence[Sequence[int]]
    ) -> None:
        """Copy a run's settings to the device; rows beyond the lists get neutral ones.

        Args:
            numbers: temperature, top_k, top_p, min_p and repetition penalty of each row.
            seeds: seed of each row; the lower 64 bits count.
            histories: tokens that each row has seen.
        """
        idle = len(self.seeds) - len(seeds)
        self.numbers.copy_(torch.tensor([*numbers, *[NEUTRAL] * idle], dtype=torch.float32))
        signed = [(seed + SEEDS // 2) % SEEDS - SEEDS // 2 for seed in seeds]
        self.seeds.copy_(torch.tensor([*signed, *[0] * idle], dtype=torch.int64))
        self.seen.zero_()
        for row, history in enumerate(histories):
            self.seen[row, torch.tensor(list(history), dtype=torch.int64, device=self.seen.device)] = 1


@dataclass(frozen=True)
class Choosing:
    """The inputs of choosing tokens on the device, and the report that it leaves for the host.

    Attributes:
        left: [B] int64, tokens that a row may still choose.
        ends: [B, E] int64, tokens that end each row; -1 for an unused entry.
        report: [B, 3] float64 for the last step: token (-1 where the row had none), natural logarithm of its
            probability before sampling changed it, number of logits that were not finite.
        drawing: inputs of drawing; None where the likeliest token is taken.
    """

    left: Tensor
    ends: Tensor
    report: Tensor
    drawing: Drawing | None = None

    @classmethod
    def allocate(cls, batch: int, device: torch.device, drawing: Drawing | None = None) -> "Choosing":
        """Return inputs under which every row chooses without a limit."""

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        report = torch.zeros(batch, 3, dtype=torch.float64, device=device)
        return cls(full(UNLIMITED, batch), full(-1, batch, MOST_ENDS), report, drawing)

    def begin(self, left: Sequence[int], ends: Sequence[Collection[int]] = ()) -> None:
        """Copy a run's limits to the device.

        Args:
            left: number of tokens that each of the first rows may choose, the next one included.
            ends: end tokens of each of the first rows, none for the others; the device knows MOST_ENDS of a row, and
                the host sees others a few steps later.
        """
        self.left[: len(left)].copy_(torch.tensor(left, dtype=torch.int64))
        known = [sorted(each)[:MOST_ENDS] for each in (*ends, *[()] * (len(self.ends) - len(ends)))]
        self.ends.copy_(torch.tensor([[*each, *[-1] * (MOST_ENDS - len(each))] for each in known], dtype=torch.int64))


@dataclass
class ChooseStep:
    """Chooses the next token of each row and makes it the next input, without leaving the device.

    Attributes:
        choose: kernel that takes the likeliest token, or draws one (`graphcore.kernels.gpu`).
    """

    group: int
    state: StepState
    choosing: Choosing
    choose: Callable[..., None] = field(repr=False)
    narrows: bool = False

    def replay(self) -> None:
        """Fill `chosen` and the report, and set the next step's inputs."""
        state, choosing, drawing = self.state, self.choosing, self.choosing.drawing
        flow = (state.token_ids, state.span.starts, state.span.counts, choosing.left, choosing.ends)
        outputs = (state.chosen, choosing.report)
        if drawing is None:
            self.choose(state.logits, *flow, *outputs)
            return
        self.choose(state.logits, drawing.numbers, drawing.seeds, drawing.seen, self.narrows, *flow, *outputs)


def choose_step(state: StepState, choosing: Choosing, narrows: bool) -> ChooseStep:
    """Return the step that chooses on the device with Triton kernels."""
    from graphcore.kernels.gpu.sampling.drawn import choose_drawn
    from graphcore.kernels.gpu.sampling.likeliest import choose_likeliest

    return ChooseStep(0, state, choosing, choose_likeliest if choosing.drawing is None else choose_drawn, narrows)
