"""Sampling on the device, inside a captured graph: nothing is read back before the next step.

Legend: B rows, V vocab, E end tokens.

    logits -> token, log probability -> next input; a row that has ended has no token in the next step

Everything that differs between rows and runs (end tokens, how many tokens a row may choose, sampling parameters) lies
in tensors at fixed addresses, so that one graph serves all of them. Three graphs, which share the tensors, choose in
three ways (phases); a row's token is the same in each that may choose it:

    "decode"        the likeliest token                                rows that are greedy
    "sample"        a draw from all tokens, or the likeliest           rows without top-k and top-p
    "top_k_top_p"   a draw from the tokens that top-k and top-p keep   any row
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from graphcore.device import on_device
from graphcore.graph.state import StepState
from graphcore.sampling_params import SamplingParams

MOST_ENDS = 64
UNLIMITED = 1 << 62
SEEDS = 1 << 64
GREEDY = SamplingParams()


def sampling_phase(params: Sequence[SamplingParams]) -> str:
    """Return the phase of the decode program that chooses tokens with rows' sampling parameters."""
    if all(each.is_greedy for each in params):
        return "decode"
    return "top_k_top_p" if any(each.has_top_k_top_p for each in params) else "sample"


@dataclass(frozen=True)
class RowSettings:
    """The settings of choosing one row's tokens; the defaults take the likeliest, without a limit.

    Attributes:
        left: number of tokens that the row may choose, the next one included.
        ends: tokens that end the row; the device knows MOST_ENDS of them, and the host sees others a few steps later.
        params: sampling parameters, in kernels' own terms.
        history: tokens that the penalty applies to from the beginning.
    """

    left: int = UNLIMITED
    ends: Collection[int] = ()
    params: SamplingParams = GREEDY
    history: Sequence[int] = ()


@dataclass(frozen=True)
class SamplingBuffers:
    """The inputs of choosing tokens on the device, besides the logits, and the report that it leaves for the host.

    Attributes:
        left: [B] int64, tokens that a row may still choose.
        ends: [B, E] int64, tokens that end each row; -1 for an unused entry.
        report: [B, 3] float64 for the last step: token (-1 where the row had none), natural logarithm of its
            probability before sampling changed it, number of logits that were not finite.
        numbers: sampling parameters of each row, [B, NUMBERS] float32, in the order of `PARAMETERS`.
        seeds: [B] int64; what a row draws follows from its seed and the token's position.
        seen: [B, V] uint8, 1 for tokens that the penalty applies to.
    """

    left: Tensor
    ends: Tensor
    report: Tensor
    numbers: Tensor
    seeds: Tensor
    seen: Tensor

    @classmethod
    def allocate(cls, batch: int, vocab: int, device: torch.device) -> "SamplingBuffers":
        """Return inputs under which every row chooses the likeliest token, without a limit."""

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        report = torch.zeros(batch, 3, dtype=torch.float64, device=device)
        numbers = torch.tensor([GREEDY.numbers] * batch, dtype=torch.float32, device=device)
        seen = torch.zeros(batch, vocab, dtype=torch.uint8, device=device)
        return cls(full(UNLIMITED, batch), full(-1, batch, MOST_ENDS), report, numbers, full(0, batch), seen)

    def put(self, row: int, settings: RowSettings) -> None:
        """Make the settings those of a row, after all work enqueued so far."""
        device, known = self.left.device, sorted(settings.ends)[:MOST_ENDS]
        self.left[row].fill_(settings.left)
        self.ends[row].copy_(on_device([*known, *[-1] * (MOST_ENDS - len(known))], device))
        self.numbers[row].copy_(on_device(settings.params.numbers, device, torch.float32))
        self.seeds[row].fill_((settings.params.seed + SEEDS // 2) % SEEDS - SEEDS // 2)
        self.seen[row].zero_()
        if settings.history:
            self.seen[row].index_fill_(0, on_device(settings.history, device), 1)

    def copy_row(self, row: int, source: "SamplingBuffers") -> None:
        """Make a row the same as the only row of other inputs, its report included."""
        for each in fields(self):
            getattr(self, each.name)[row].copy_(getattr(source, each.name)[0])


@dataclass
class ChooseStep:
    """Chooses the next token of each row and makes it the next input, without leaving the device.

    Attributes:
        phase: way of choosing: "decode", "sample" or "top_k_top_p".
        choose: kernel that takes the likeliest token, or draws one (`graphcore.kernels.gpu`).
    """

    group: int
    state: StepState
    choosing: SamplingBuffers
    phase: str
    choose: Callable[..., None] = field(repr=False)

    def replay(self) -> None:
        """Fill `chosen` and the report, and set the next step's inputs."""
        state, choosing = self.state, self.choosing
        flow = (state.token_ids, state.span.starts, state.span.counts, choosing.left, choosing.ends)
        outputs = (state.chosen, choosing.report)
        if self.phase == "decode":
            self.choose(state.logits, *flow, *outputs)
            return
        drawing = (choosing.numbers, choosing.seeds, choosing.seen, self.phase == "top_k_top_p")
        self.choose(state.logits, *drawing, *flow, *outputs)


def choose_step(state: StepState, choosing: SamplingBuffers, phase: str) -> ChooseStep:
    """Return the step that chooses on the device with Triton kernels, in the way of a phase."""
    from graphcore.kernels.gpu.sampling.drawn import choose_drawn
    from graphcore.kernels.gpu.sampling.likeliest import choose_likeliest

    return ChooseStep(0, state, choosing, phase, choose_likeliest if phase == "decode" else choose_drawn)


class SamplingRows:
    """The rows of decode programs that choose on the device, which the host starts and stops one by one.

    The host changes a row between two steps, in the order of its calls, and waits for nothing. Rows that it does not
    name go on as they are. A row's first token is chosen apart, as other rows may not choose then.

    Args:
        state: inputs and logits of all rows.
        vocab: size of the vocabulary.

    Attributes:
        choosing: settings of all rows, and their report.
    """

    def __init__(self, state: StepState, vocab: int) -> None:
        self.state = state
        self._device, self._vocab = state.token_ids.device, vocab
        self.choosing = SamplingBuffers.allocate(len(state.token_ids), vocab, self._device)
        # One row at addresses of its own: Triton compiles a kernel anew for an address that is aligned otherwise.
        self._one, self._first = StepState.empty(1, 1, self._device), SamplingBuffers.allocate(1, vocab, self._device)
        self._steps: dict[str, ChooseStep] = {}

    def begin(self, row: int, token_id: int, position: int, settings: RowSettings) -> None:
        """Make a token, at its position in the sequence, the next input of a row."""
        self._one.put_rows([[token_id]], [position])
        self._first.put(0, settings)
        self._give_to(row)

    def begin_after(self, row: int, logits: Tensor, position: int, settings: RowSettings, phase: str) -> None:
        """Choose the token at a position from logits [1, V] in the way of a phase, and make it a row's next input."""
        self._one.put_rows([[0]], [position - 1])  # choosing moves on by one
        self._first.put(0, settings)
        self._one.logits = logits
        self._step(phase).replay()
        self._give_to(row)

    def stop(self, row: int) -> None:
        """Let a row have no token in the steps from now on."""
        self.state.span.counts[row].zero_()

    def warm_up(self, phase: str) -> None:
        """Load the kernels that choose a first token in the way of a phase."""
        self._one.logits = torch.zeros(1, self._vocab, device=self._device, dtype=torch.float32)
        self._one.span.counts.zero_()
        self._step(phase).replay()

    def _step(self, phase: str) -> ChooseStep:
        if phase not in self._steps:
            self._steps[phase] = choose_step(self._one, self._first, phase)
        return self._steps[phase]

    def _give_to(self, row: int) -> None:
        state, one = self.state, self._one
        pairs = ((state.token_ids, one.token_ids), (state.span.starts, one.span.starts))
        for place, value in (*pairs, (state.span.counts, one.span.counts)):
            place[row].copy_(value[0])
        self.choosing.copy_row(row, self._first)
