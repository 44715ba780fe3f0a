"""Decode steps in which the device chooses tokens, a few steps ahead of the host.

    device   step 0 | copy | step 1 | copy | step 2 | copy | ...          copies go to locked memory, a slot for each
    host     ask 0, 1, 2     read 0, ask 3     read 1, ask 4     ...      reading waits for the mark behind the copy

The device never waits for the host. A stop that only the host sees costs at most LAG steps.

Legend: B requests, V vocab.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.engine.running_request import RunningRequest
from graphcore.engine.sampler import SamplingParams
from graphcore.graph.program import Program
from graphcore.graph.token_choice import Choosing
from graphcore.kernels.draw import not_finite
from graphcore.streaming.policy import Policy
from graphcore.streaming.scheduler import run_program

LAG = 2  # steps that the host is behind


class Picked(NamedTuple):
    """The tokens that one step chose, one for each row of the batch.

    Attributes:
        token_ids: chosen tokens; -1 for a row that had already ended.
        logprobs: natural logarithms of the tokens' probabilities before sampling parameters applied; None if they were
            not asked for.
    """

    token_ids: list[int]
    logprobs: list[float] | None


class Readback:
    """A queue of copies of one device tensor to locked host memory, allocated once and read in order.

    Args:
        source: tensor on the device.
        most: copies that may be under way at once.
    """

    def __init__(self, source: Tensor, most: int) -> None:
        self._source = source
        is_pinned = source.device.type == "cuda"
        places = torch.empty(most, *source.shape, dtype=source.dtype, pin_memory=is_pinned)
        self._places = places.unbind(0)
        self._values = [place.numpy() for place in self._places]  # the same memory
        self._marks = [torch.cuda.Event() for _ in range(most)]  # type: ignore[no-untyped-call]
        self._sent = self._taken = 0

    @property
    def num_waiting(self) -> int:
        """Copies that have not been read."""
        return self._sent - self._taken

    def send(self) -> None:
        """Enqueue a copy of the source as it will be after all work enqueued so far."""
        assert self.num_waiting < len(self._places), "every place holds a copy that nobody has read"
        index = self._sent % len(self._places)
        self._places[index].copy_(self._source, non_blocking=True)
        self._marks[index].record(torch.cuda.current_stream(self._source.device))
        self._sent += 1

    def take(self) -> list[list[float]]:
        """Return the oldest copy that has not been read, waiting for it."""
        assert self.num_waiting > 0, "nothing was sent"
        index = self._taken % len(self._places)
        self._marks[index].synchronize()
        self._taken += 1
        values: list[list[float]] = self._values[index].tolist()
        return values


class DeviceDecoding:
    """Captured decode steps in which the device chooses tokens and ends rows at end tokens and length limits.

    The host sees its own stops, such as stop strings, up to LAG steps late; the caches then hold that many tokens more.
    `launch` starts a step, and `take` returns the tokens of the oldest one.

    Args:
        program: a decode program whose last step chooses tokens.
        params: sampling parameters of each request.
        most: limit of new tokens for each request.
    """

    def __init__(
        self,
        program: Program,
        requests: Sequence[RunningRequest],
        params: Sequence[SamplingParams],
        most: Sequence[int],
        wants_logprobs: bool,
    ) -> None:
        assert program.choice is not None, "this program leaves choosing to the host"
        self.wants_logprobs = wants_logprobs
        self._program, self._choice, self._requests = program, program.choice, requests
        self._params, self._most = params, most
        self._readback = Readback(self._choice.choosing.report, LAG + 1)

    @property
    def num_waiting(self) -> int:
        """Steps whose tokens were not taken."""
        return self._readback.num_waiting

    def first(self, logits: Tensor) -> None:
        """Choose each request's first token on the device, as the input of the first step."""
        state, num_requests = self._program.state, len(self._requests)
        begin_choosing(self._choice.choosing, self._params, self._most, self._requests)
        state.logits[:num_requests] = logits
        # The position before the first token: choosing moves on by one.
        lasts = [len(request.prompt_ids) - 1 for request in self._requests]
        state.put_rows([[0]] * num_requests, lasts)
        self._choice.replay()
        self._readback.send()

    def launch(self, policy: Policy) -> None:
        """Enqueue a step."""
        run_program(self._program, policy)
        self._readback.send()

    def take(self) -> Picked:
        """Return the tokens of the oldest step that were not taken yet, waiting for it."""
        rows = self._readback.take()[: len(self._requests)]
        if any(bad for _, _, bad in rows):
            raise not_finite()
        return Picked([int(token) for token, _, _ in rows], [row[1] for row in rows] if self.wants_logprobs else None)


def begin_choosing(
    choosing: Choosing, params: Sequence[SamplingParams], most: Sequence[int], requests: Sequence[RunningRequest]
) -> None:
    """Set the sampling parameters, limits and end tokens of a run in the state of a program's choosing step."""
    choosing.begin(most, [request.end_ids for request in requests])
    if choosing.drawing is not None:
        penalised = [each.repetition_penalty != 1.0 for each in params]
        histories = [request.prompt_ids if has else () for request, has in zip(requests, penalised, strict=True)]
        choosing.drawing.begin([each.numbers for each in params], [each.seed for each in params], histories)
