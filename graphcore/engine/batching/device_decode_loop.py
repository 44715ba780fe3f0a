"""The device decode loop: a GPU samples, a few steps ahead of the host; rows join and leave between two steps.

    device   step 0 | copy | step 1 | B joins | copy | step 2 | copy | ...
    host     launch 0, 1, B, 2       read 0, launch 3    read 1, launch 4   ...

Copies of the sampled tokens go to pinned memory, a slot for each step; reading waits for the event after the copy. The
device never waits for the host. One captured graph runs all rows; those without a request have no token, read no cache
and write none. What the host changes of a row (its inputs when a request joins, its end) is enqueued in the stream of
the steps, and touches no other row. The host records the requests of each step, so that a token never reaches a later
request of the row. A row's results do not depend on the other rows, because kernels always run at the graph's width.

The device ends a row at its end tokens and at its limit of tokens. The host ends it otherwise (a stop string, a
deadline, `cancel`); up to LAG more steps have then run the row, and their tokens are dropped. If other requests may
reuse its cache (`reuse_cache`), it leaves when those steps are read, because the caches hold their tokens too.

The host samples the tokens of a request that has a mask, top log probabilities, or parameters that kernels do not know
(`Request.samples_on_host`). The request takes part in a step when its next token is known, and in no other. While it
runs, the host is one step behind instead of LAG. So it takes part in every second step beside others, and in every step
alone; the others keep their pace, unless the host takes longer than a step.

While weights move, the host reads each step before it launches the next one: a pass is long, the first groups of the
next one are read ahead all the same, and a request that ends costs nothing more.

Legend: B rows, V vocab.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.engine.batching.host_decode_loop import IDLE
from graphcore.engine.batching.interface import DecodeLoop
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.sampler import SequenceSampler
from graphcore.graph.gpu.sampling import RowSettings, SamplingRows, sampling_phase
from graphcore.graph.program import Program
from graphcore.kernels.ops.draw import not_finite
from graphcore.streaming.policy import Resident

LAG = 2  # steps that the host is behind


class Readback:
    """A queue of copies of one device tensor to pinned host memory, allocated once and read in order.

    Args:
        source: tensor on the device.
        most: most copies that have not been read.
    """

    def __init__(self, source: Tensor, most: int) -> None:
        self._source = source
        is_pinned = source.device.type == "cuda"
        places = torch.empty(most, *source.shape, dtype=source.dtype, pin_memory=is_pinned, device="cpu")
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
        """Wait for the oldest copy that has not been read, and return its values."""
        assert self.num_waiting > 0, "nothing was sent"
        index = self._taken % len(self._places)
        self._marks[index].synchronize()
        self._taken += 1
        values: list[list[float]] = self._values[index].tolist()
        return values

    def drop(self) -> None:
        """Discard the copies that have not been read."""
        self._taken = self._sent


class _Step(NamedTuple):
    """A step whose tokens the host has not read.

    Attributes:
        rows: rows and requests for which the step samples a token.
        logits: [V] float32 of each of these requests whose token the host samples instead.
    """

    rows: Sequence[tuple[int, Request]]
    logits: Mapping[Request, Tensor]


class DeviceDecodeLoop(DecodeLoop):
    """Decode loop of captured steps in which the device samples tokens and ends rows."""

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner, self._chooser = runner, SequenceSampler(runner)
        self._lag = LAG if isinstance(runner.policy, Resident) else 0
        self._on: dict[int, Request] = {}  # rows that may have a token in the next step
        self._due: Sequence[Request] = ()  # requests of the step that `start` returned
        self._in_flight: deque[_Step] = deque()
        self._late: dict[Request, list[int]] = {}  # tokens sampled after a request's end

    @cached_property
    def _rows(self) -> SamplingRows:
        return self._runner.programs.sampling_rows

    @cached_property
    def _readback(self) -> Readback:
        return Readback(self._rows.choosing.report, LAG + 1)

    def take_forced(self, requests: Sequence[Request]) -> None:
        """Append the tokens that masks force; they run one by one."""
        due = {request for step in self._in_flight for request in step.logits}
        self._chooser.take_forced([request for request in requests if request not in due])

    def start(self, tokens: Mapping[Request, Sequence[int]]) -> tuple[list[Program], Mapping[Request, int]]:
        """Return the captured program of all rows, if any request needs a token beyond those of launched steps."""
        going_on = [request for request in tokens if not request.has_ended]  # once: other threads end requests
        for row, request in list(self._on.items()):
            if request.has_ended and request not in going_on:
                self._rows.stop(row)
                del self._on[row]
        self._due = due = [request for request in going_on if self._is_due(request)]
        for request in due:
            is_replayed = request.num_uncomputed > 1  # its tokens run again after it was swapped out
            if request.samples_on_host or is_replayed or self._on.get(request.own_row) is not request:
                settings = RowSettings(left=1) if is_replayed else self._settings(request)
                self._rows.begin(request.own_row, request.next_id, request.num_computed, settings)
                if not is_replayed:
                    self._on[request.own_row] = request
        params = [request.params for request in due if not request.samples_on_host]
        return ([self._runner.programs.sampling_program(params)] if due else []), dict.fromkeys(due, 1)

    def _is_due(self, request: Request) -> bool:
        """Return whether a request may still need a token beyond those of the steps already launched."""
        if request.samples_on_host:
            return request.num_uncomputed >= 1  # more than one when it runs again after it was swapped out
        return request.num_computed + 1 - len(request.prompt_ids) < self._most(request)

    def _most(self, request: Request) -> int:
        """Return the largest number of new tokens: the request's limit, or fewer if its cache is full earlier."""
        return min(request.max_new_tokens, self._runner.sizes.context - len(request.prompt_ids) + 1)

    def _settings(self, request: Request) -> RowSettings:
        """Return the device's sampling settings; if the host samples, it samples one token, which the host ignores."""
        if request.samples_on_host:
            return RowSettings(left=1)
        params = request.params
        history = request.ids if params.repetition_penalty != 1.0 else ()
        left = self._most(request) - len(request.token_ids)
        ends = request.end_ids.union(params.stop_token_ids)
        return RowSettings(left, ends, params.for_kernels(), history)

    def finish(self, ended: Sequence[tuple[Request, Tensor]]) -> bool:
        """Sample first tokens on the device, and read steps until the host is at most its allowed lag behind."""
        logits = self._rows.state.logits
        given = [one for one in self._due if one.num_uncomputed < 1]
        by_host = {one: logits[one.own_row].clone() for one in given if one.samples_on_host}
        for request, after in ended:
            if request.samples_on_host:
                by_host[request] = after[0]
                continue
            self._on[request.own_row] = request
            position, phase = len(request.prompt_ids), sampling_phase([request.params])
            self._rows.begin_after(request.own_row, after, position, self._settings(request), phase)
        rows = [(one.own_row, one) for one in (*given, *(request for request, _ in ended))]
        self._due = ()
        most = len(self._in_flight) - 1  # if nothing was launched, a step is read
        if rows:
            self._readback.send()
            self._in_flight.append(_Step(rows, by_host))
            most = min(self._lag, 1) if any(step.logits for step in self._in_flight) else self._lag
        has_given = self._read_to(max(most, 0))
        has_work = has_given or bool(self._in_flight) or bool(rows)
        return self._chooser.choose_pending(0.0 if has_work else IDLE) or has_given

    def _read_to(self, most: int) -> bool:
        """Read back the oldest steps until at most `most` are in flight; return whether any request got a token."""
        has_given = False
        while len(self._in_flight) > most:
            step, report = self._in_flight.popleft(), self._readback.take()
            for row, request in step.rows:
                if request not in step.logits:
                    self._give(request, *report[row])
                has_given = True
            self._chooser.choose([*step.logits], [*step.logits.values()])
        return has_given

    def _give(self, request: Request, token_id: float, logprob: float, num_bad: float) -> None:
        """Append the token that the device sampled, unless the device had ended the row before the step."""
        if token_id < 0:
            request.take_back_computed()
            return
        if num_bad:
            request.fail(not_finite())
        known = len(request.token_ids)
        request.take(int(token_id), logprob if request.wants_logprobs else None, self._runner.sizes.context)
        if len(request.token_ids) == known and request.reuses_cache:
            self._late.setdefault(request, []).append(int(token_id))

    def drain(self, request: Request) -> None:
        """Read the steps that run the request, and stop its row."""
        if self._is_in_flight(request):
            self._read_to(0)
        if self._on.get(request.own_row) is request:
            self._rows.stop(request.own_row)
            del self._on[request.own_row]

    def may_leave(self, request: Request) -> bool:
        """Return whether a request may leave; it waits for its launched steps if others may reuse its cache."""
        if not request.reuses_cache:
            return True
        return not self._is_in_flight(request)

    def _is_in_flight(self, request: Request) -> bool:
        return any(request is one for step in self._in_flight for _, one in step.rows)

    def leave(self, request: Request) -> list[int]:
        """Remove a request that has ended, and return those of its tokens that the caches hold."""
        self._chooser.forget(request)
        return [*request.ids, *self._late.pop(request, [])][: request.num_computed]

    def drop(self) -> None:
        """Discard the steps whose tokens were not read; their requests have ended, so their rows stop."""
        if self._in_flight:
            self._readback.drop()
        self._in_flight.clear()
        self._due = ()
