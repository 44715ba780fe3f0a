"""How a run's tokens come: chosen by the host from logits, or by the device itself, a few steps ahead of the host.

    HostDecoding      program, logits, choice, feed; then the token is read, and the next step waits for that
    DeviceDecoding    captured graphs that choose and feed themselves; tokens are read LAG steps later

Legend: B requests, V vocab.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.engine.passes import set_inputs
from graphcore.engine.readback import LAG, Readback
from graphcore.engine.sampler import Sampler, SamplingParams
from graphcore.engine.sequence import Sequence as Request
from graphcore.engine.token_runner import TokenRunner
from graphcore.errors import GraphError
from graphcore.graph.choosing import Choosing
from graphcore.graph.program import Program
from graphcore.streaming.policy import Policy
from graphcore.streaming.scheduler import run_program


class Picked(NamedTuple):
    """What one step chose for each row of the batch.

    Attributes:
        token_ids: -1 for a row that had ended before.
        logprobs: natural logarithms of their probabilities before sampling changed them; None if nobody asked.
    """

    token_ids: list[int]
    logprobs: list[float] | None


class Decoding(ABC):
    """The steps of one run; `launch` them and `take` what they chose, in order.

    Attributes:
        lag: steps that may be under way behind the one that is taken next.
    """

    lag: int

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Steps whose tokens were not taken."""

    @abstractmethod
    def first(self, logits: Tensor) -> None:
        """Launch the choice of each request's first token, from [B, V] float32 after its prompt."""

    @abstractmethod
    def launch(self, policy: Policy) -> None:
        """Launch a step: the tokens chosen last go in, and the next ones are chosen."""

    @abstractmethod
    def take(self) -> Picked:
        """Return what the oldest step that was not taken chose.

        Raises:
            GraphError: the logits were not finite.
        """


class HostDecoding(Decoding):
    """The host chooses, from logits."""

    lag = 0
    num_waiting = 0

    def __init__(
        self, runner: TokenRunner, requests: Sequence[Request], params: SamplingParams, wants_logprobs: bool
    ) -> None:
        self.requests, self.wants_logprobs = requests, wants_logprobs
        self._runner, self._width = runner, runner.width(len(requests))
        self._is_greedy = params.is_greedy
        histories = [request.prompt_ids for request in requests]
        histories += [()] * (self._width - len(requests))
        self._sampler = Sampler(params, histories, runner.vocab, runner.device)
        self._program: Program | None = None
        self._chosen = self._logits = torch.empty(0)

    def first(self, logits: Tensor) -> None:
        """Choose each request's first token."""
        padded = logits.new_zeros(self._width, logits.shape[1])
        padded[: len(logits)] = logits
        check_finite(logits)
        self._chosen, self._logits = self._sampler.choose(padded), padded
        self.num_waiting += 1

    def launch(self, policy: Policy) -> None:
        """Run a step and choose; requests that have ended have no token in it."""
        if self._program is None:
            self._program = self._runner.program("decode", self._width, self._is_greedy)
            begin(self._program, self.requests, self._chosen.tolist(), self._width)
        state = self._program.state
        active = [request.finish_reason is None for request in self.requests]
        state.span.counts[: len(active)].copy_(torch.tensor(active, dtype=state.span.counts.dtype))
        run_program(self._program, policy)
        if self._is_greedy:
            self._chosen = state.chosen
        else:
            check_finite(state.logits)
            self._chosen = self._sampler.choose(state.logits)
            state.feed(self._chosen)
        self._logits = state.logits
        self.num_waiting += 1

    def take(self) -> Picked:
        """Return what was chosen last, waiting for the device."""
        self.num_waiting -= 1
        token_ids = self._chosen.tolist()
        if not self.wants_logprobs:
            return Picked(token_ids, None)
        index = torch.tensor(token_ids, device=self._logits.device)[:, None]
        return Picked(token_ids, self._logits.log_softmax(dim=-1).gather(1, index)[:, 0].tolist())


def begin(program: Program, requests: Sequence[Request], token_ids: Sequence[int], width: int) -> None:
    """Make each request's first token, after its prompt, the program's next input."""
    lengths = [len(request.prompt_ids) for request in requests]
    set_inputs(program.state, [[token_id] for token_id in token_ids[: len(requests)]], lengths, width, 1)


class DeviceDecoding(Decoding):
    """The device chooses, in captured graphs, and ends rows at end tokens and lengths; the host reads.

    A stop that only the host sees, at most LAG steps later, leaves that many tokens too many in the caches.

    Args:
        program: one that chooses.
        most: tokens that each request may choose.
        end_ids: tokens that end a request.
    """

    lag = LAG

    def __init__(
        self,
        program: Program,
        requests: Sequence[Request],
        params: SamplingParams,
        most: Sequence[int],
        end_ids: Collection[int],
        wants_logprobs: bool,
    ) -> None:
        assert program.choice is not None, "this program leaves choosing to the host"
        self.wants_logprobs = wants_logprobs
        self._program, self._choice, self._requests = program, program.choice, requests
        self._params, self._most, self._end_ids = params, most, end_ids
        self._readback = Readback(self._choice.choosing.report, LAG + 1)

    @property
    def num_waiting(self) -> int:
        """Steps whose tokens were not taken."""
        return self._readback.num_waiting

    def first(self, logits: Tensor) -> None:
        """Choose each request's first token; it becomes the first step's input without being read."""
        state, num_requests = self._program.state, len(self._requests)
        begin_choosing(self._choice.choosing, self._params, self._most, self._end_ids, self._requests)
        state.logits[:num_requests] = logits
        # The position before the first token: choosing moves on by one.
        lasts = [len(request.prompt_ids) - 1 for request in self._requests]
        set_inputs(state, [[0]] * num_requests, lasts, len(state.token_ids), 1)
        self._choice.replay()
        self._readback.send()

    def launch(self, policy: Policy) -> None:
        """Enqueue a step."""
        run_program(self._program, policy)
        self._readback.send()

    def take(self) -> Picked:
        """Return what the oldest step chose, waiting for it."""
        rows = self._readback.take()[: len(self._requests)]
        if any(bad for _, _, bad in rows):
            raise not_finite()
        return Picked([int(token) for token, _, _ in rows], [row[1] for row in rows] if self.wants_logprobs else None)


def begin_choosing(
    choosing: Choosing,
    params: SamplingParams,
    most: Sequence[int],
    end_ids: Collection[int],
    requests: Sequence[Request],
) -> None:
    """Give a device's choice a run's settings and limits."""
    choosing.begin(most, end_ids)
    if choosing.drawing is not None:
        numbers = (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)
        histories = [request.prompt_ids for request in requests] if params.repetition_penalty != 1.0 else []
        choosing.drawing.begin(numbers, params.seed, histories)


def check_finite(logits: Tensor) -> None:
    """Return if no logit is NaN or infinite.

    Raises:
        GraphError: one is; no choice of a token would mean anything.
    """
    if not bool(logits.isfinite().all()):
        raise not_finite()


def not_finite() -> GraphError:
    """Return the error of logits that mean nothing."""
    return GraphError(
        "the model's logits are not finite (NaN or infinity): its weights are damaged, or the dtype is too narrow "
        "for it; try dtype=bf16 or dtype=fp32"
    )
