"""Sampling on the device inside a captured graph: the next step starts without the host reading the token.

Legend: B rows, V vocab, E end tokens.

    logits -> token, log probability -> next input; a row that has ended has no token in the next step

All settings that differ between rows and runs (end tokens, token limits, sampling parameters) are in tensors at fixed
addresses, so that one graph serves all of them. Three graphs (phases) share these tensors and sample in three ways; a
row gets the same token in each phase that supports it:

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
    """Return the fastest phase that supports the sampling parameters of all rows."""
    if all(each.is_greedy for each in params):
        return "decode"
    return "top_k_top_p" if any(each.has_top_k_top_p for each in params) else "sample"


@dataclass(frozen=True)
class RowSettings:
    """The sampling settings of one row; by default greedy, without a token limit.

    Attributes:
        left: number of tokens that the row may still generate, the next one included.
        ends: tokens that end the row; the device checks MOST_ENDS of them, the host any others a few steps later.
        params: sampling parameters as kernels use them (`SamplingParams.for_kernels`).
        history: earlier tokens that the repetition penalty applies to.
    """

    left: int = UNLIMITED
    ends: Collection[int] = ()
    params: SamplingParams = GREEDY
    history: Sequence[int] = ()


@dataclass(frozen=True)
class SamplingBuffers:
    """The inputs of sampling on the device, besides the logits, and its report to the host.

    Attributes:
        left: [B] int64, number of tokens that a row may still generate.
        ends: [B, E] int64, tokens that end each row; -1 for an unused entry.
        report: [B, 3] float64 for the last step: token (-1 where the row had none), natural logarithm of its
            probability before sampling changed it, number of logits that were not finite.
        numbers: sampling parameters of each row, [B, NUMBERS] float32, in the order of `KERNEL_PARAMETERS`.
        seeds: [B] int64, seeds; seed and position of a token determine its random numbers.
        seen: [B, V] uint8, 1 for tokens that the repetition penalty applies to.
    """

    left: Tensor
    ends: Tensor
    report: Tensor
    numbers: Tensor
    seeds: Tensor
    seen: Tensor

    @classmethod
    def allocate(cls, batch: int, vocab: int, device: torch.device) -> "SamplingBuffers":
        """Return buffers whose rows are all greedy, without a token limit."""

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        report = torch.zeros(batch, 3, dtype=torch.float64, device=device)
        numbers = torch.tensor([GREEDY.numbers] * batch, dtype=torch.float32, device=device)
        seen = torch.zeros(batch, vocab, dtype=torch.uint8, device=device)
        return cls(full(UNLIMITED, batch), full(-1, batch, MOST_ENDS), report, numbers, full(0, batch), seen)

    def put(self, row: int, settings: RowSettings) -> None:
        """Write a row's settings, after all work enqueued so far."""
        device, known = self.left.device, sorted(settings.ends)[:MOST_ENDS]
        self.left[row].fill_(settings.left)
        self.ends[row].copy_(on_device([*known, *[-1] * (MOST_ENDS - len(known))], device))
        self.numbers[row].copy_(on_device(settings.params.numbers, device, torch.float32))
        self.seeds[row].fill_((settings.params.seed + SEEDS // 2) % SEEDS - SEEDS // 2)
        self.seen[row].zero_()
        if settings.history:
            self.seen[row].index_fill_(0, on_device(settings.history, device), 1)

    def copy_row(self, row: int, source: "SamplingBuffers") -> None:
        """Copy the only row of other buffers to a row, its report included."""
        for each in fields(self):
            getattr(self, each.name)[row].copy_(getattr(source, each.name)[0])


@dataclass
class ChooseStep:
    """Chooses the next token of each row and makes it the next input, without leaving the device.

    Attributes:
        phase: sampling phase: "decode", "sample" or "top_k_top_p".
        choose: function that launches the argmax or sampling kernel (`graphcore.kernels.gpu`).
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
    """Return the step that samples with Triton kernels, as the phase says."""
    from graphcore.kernels.gpu.sampling.drawn import choose_drawn
    from graphcore.kernels.gpu.sampling.likeliest import choose_likeliest

    return ChooseStep(0, state, choosing, phase, choose_likeliest if phase == "decode" else choose_drawn)


class SamplingRows:
    """The rows of decode programs that sample on the device, which the host starts and stops one by one.

    The host enqueues changes to a row between two steps and never waits for the device. Other rows are not affected. A
    row's first token is sampled separately, so that no other row samples.

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
        # A separate one-row state, not a view of a row: Triton recompiles a kernel for differently aligned addresses.
        self._one, self._first = StepState.empty(1, 1, self._device), SamplingBuffers.allocate(1, vocab, self._device)
        self._steps: dict[str, ChooseStep] = {}

    def begin(self, row: int, token_id: int, position: int, settings: RowSettings) -> None:
        """Start a row: its next input is the given token at the given position of the sequence."""
        self._one.put_rows([[token_id]], [position])
        self._first.put(0, settings)
        self._give_to(row)

    def begin_after(self, row: int, logits: Tensor, position: int, settings: RowSettings, phase: str) -> None:
        """Sample the token at a position from logits [1, V] as the phase says, and start a row with it."""
        self._one.put_rows([[0]], [position - 1])  # the sampling step advances the position by one
        self._first.put(0, settings)
        self._one.logits = logits
        self._step(phase).replay()
        self._give_to(row)

    def stop(self, row: int) -> None:
        """Stop a row: it has no token in later steps."""
        self.state.span.counts[row].zero_()

    def warm_up(self, phase: str) -> None:
        """Load the kernels that sample a first token in a phase."""
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
