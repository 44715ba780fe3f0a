"""The device decode loop: a GPU samples, a few steps ahead of the host; rows join and leave between two steps.

    device   step 0 | copy | step 1 | B joins | copy | step 2 | copy | ...
    host     ask 0, 1, B, 2          read 0, ask 3    read 1, ask 4   ...

Copies of the chosen tokens go to locked memory, a slot for each step; reading waits for the mark behind the copy. The
device never waits for the host. One captured graph runs all rows; those without a sequence have no token, read no cache
and write none. What the host changes of a row (its inputs when it joins, its end) is work in the same queue as the
steps, and touches no other row. Each step keeps the sequences that it ran, so that a token never reaches a later
sequence of the row. A row's numbers do not depend on the other rows: products and sums are those of a graph's width.

The device ends a row at its end tokens and at its limit of tokens. The host ends it otherwise (a stop string, a
deadline, `cancel`); up to LAG more steps have then run the row, and their tokens are dropped. If other requests may go
on from the sequence (`reuse_cache`), it leaves when those steps are read, because the caches hold their tokens too.

A mask is a function of the host, so the host chooses the tokens of a sequence that has one. The sequence takes part in
a step when its token is known, and is left out of the steps until its next one is. While it runs, the host is one step
behind instead of LAG. So it takes part in every second step beside others, and in every step alone; the others keep
their pace, unless the host takes longer than a step.

While weights move, the host reads each step before it asks for the next one: a pass is long, the first groups of the
next one are read ahead all the same, and a request that ends costs nothing more.

Legend: B rows, V vocab.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.engine.batching.interface import DecodeLoop
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import TokenSequence
from graphcore.engine.sampler import SequenceSampler
from graphcore.graph.gpu.sampling import RowSettings, SamplingRows, sampling_phase
from graphcore.graph.program import Program
from graphcore.kernels.ops.draw import not_finite
from graphcore.streaming.policy import Resident

LAG = 2  # steps that the host is behind


class Readback:
    """A queue of copies of one device tensor to locked host memory, allocated once and read in order.

    Args:
        source: tensor on the device.
        most: copies that may be under way at once.
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
        """Return the oldest copy that has not been read, waiting for it."""
        assert self.num_waiting > 0, "nothing was sent"
        index = self._taken % len(self._places)
        self._marks[index].synchronize()
        self._taken += 1
        values: list[list[float]] = self._values[index].tolist()
        return values

    def drop(self) -> None:
        """Forget the copies that have not been read."""
        self._taken = self._sent


class _Step(NamedTuple):
    """A step whose tokens the host has not read.

    Attributes:
        rows: sequences that it chose a token of, with their rows.
        logits: [V] float32 of those whose token the host chooses.
    """

    rows: Sequence[tuple[int, TokenSequence]]
    logits: Mapping[TokenSequence, Tensor]


class DeviceDecodeLoop(DecodeLoop):
    """Captured decode steps in which the device chooses tokens and ends rows."""

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner, self._chooser = runner, SequenceSampler(runner)
        self._lag = LAG if isinstance(runner.policy, Resident) else 0
        self._on: dict[int, TokenSequence] = {}  # rows that may have a token in the next step
        self._due: Sequence[TokenSequence] = ()  # those that take part in the step that was started
        self._under_way: deque[_Step] = deque()
        self._late: dict[TokenSequence, list[int]] = {}  # tokens chosen after a sequence's end

    @cached_property
    def _rows(self) -> SamplingRows:
        return self._runner.programs.sampling_rows

    @cached_property
    def _readback(self) -> Readback:
        return Readback(self._rows.choosing.report, LAG + 1)

    def start(self, sequences: Sequence[TokenSequence]) -> tuple[list[Program], Sequence[TokenSequence]]:
        """Return the captured program of all rows, if any sequence needs a token beyond those under way."""
        going_on = [sequence for sequence in sequences if not sequence.has_ended]  # others end at any time
        for row, sequence in list(self._on.items()):
            if sequence.has_ended and sequence not in going_on:
                self._rows.stop(row)
                del self._on[row]
        self._due = due = [sequence for sequence in going_on if self._is_due(sequence)]
        for sequence in due:
            is_replayed = sequence.to_feed > 1  # after it was put aside
            if sequence.mask is not None or is_replayed or self._on.get(sequence.own_row) is not sequence:
                (token_id,) = sequence.next_ids(1)
                settings = RowSettings(left=1) if is_replayed else self._settings(sequence)
                self._rows.begin(sequence.own_row, token_id, sequence.fed, settings)
                if not is_replayed:
                    self._on[sequence.own_row] = sequence
        params = [sequence.params for sequence in due if sequence.mask is None]
        return ([self._runner.programs.sampling_program(params)] if due else []), due

    def _is_due(self, sequence: TokenSequence) -> bool:
        """Return whether a sequence may still need a token beyond those of the steps already launched."""
        if sequence.mask is not None:
            return sequence.to_feed >= 1  # more than one when it runs again after it was put aside
        return sequence.fed + 1 - len(sequence.request.prompt_ids) < self._most(sequence)

    def _most(self, sequence: TokenSequence) -> int:
        """Return the largest number of new tokens: the request's limit, or fewer if its cache is full earlier."""
        request = sequence.request
        return min(request.max_new_tokens, self._runner.sizes.context - len(request.prompt_ids) + 1)

    def _settings(self, sequence: TokenSequence) -> RowSettings:
        """Return how the device chooses; with a mask it may choose once, and the host does not read that token."""
        if sequence.mask is not None:
            return RowSettings(left=1)
        request, params = sequence.request, sequence.params
        history = sequence.ids if params.repetition_penalty != 1.0 else ()
        left = self._most(sequence) - len(request.token_ids)
        return RowSettings(left, request.end_ids, params.for_kernels(), history)

    def finish(self, ended: Sequence[tuple[TokenSequence, Tensor]]) -> bool:
        """Choose first tokens on the device, and read the steps that the host is too far behind."""
        logits = self._rows.state.logits
        masked = {one: logits[one.own_row].clone() for one in self._due if one.mask is not None and one.to_feed < 1}
        for sequence, after in ended:
            if sequence.mask is not None:
                masked[sequence] = after[0]
                continue
            self._on[sequence.own_row] = sequence
            position, phase = len(sequence.request.prompt_ids), sampling_phase([sequence.params])
            self._rows.begin_after(sequence.own_row, after, position, self._settings(sequence), phase)
        given = (*(one for one in self._due if one.to_feed < 1), *(sequence for sequence, _ in ended))
        rows = [(one.own_row, one) for one in given]
        self._due = ()
        most = len(self._under_way) - 1  # if nothing was launched, a step is read
        if rows:
            self._readback.send()
            self._under_way.append(_Step(rows, masked))
            most = min(self._lag, 1) if any(step.logits for step in self._under_way) else self._lag
        return self._read_to(max(most, 0))

    def _read_to(self, most: int) -> bool:
        """Read steps until `most` are left, and return whether any sequence was given a token."""
        has_given = False
        while len(self._under_way) > most:
            step, report = self._under_way.popleft(), self._readback.take()
            for row, sequence in step.rows:
                if sequence in step.logits:
                    self._chooser.choose([sequence], [step.logits[sequence]])
                else:
                    self._give(sequence, *report[row])
                has_given = True
        return has_given

    def _give(self, sequence: TokenSequence, token_id: float, logprob: float, num_bad: float) -> None:
        """Give a sequence the token that the device chose in a step, unless the sequence had ended before it."""
        if token_id < 0:
            sequence.fed -= 1  # the row had ended: nothing was written
            return
        if num_bad:
            sequence.fail(not_finite())
        known = len(sequence.request.token_ids)
        sequence.take(int(token_id), logprob if sequence.wants_logprobs else None, self._runner.sizes.context)
        if len(sequence.request.token_ids) == known and sequence.reuses_cache:
            self._late.setdefault(sequence, []).append(int(token_id))

    def settle(self, sequence: TokenSequence) -> None:
        """Read the steps that run the sequence, and stop its row."""
        if self._is_under_way(sequence):
            self._read_to(0)
        if self._on.get(sequence.own_row) is sequence:
            self._rows.stop(sequence.own_row)
            del self._on[sequence.own_row]

    def may_leave(self, sequence: TokenSequence) -> bool:
        """Return False for a sequence that others may go on from, while steps are under way that ran it."""
        if not sequence.reuses_cache:
            return True
        return not self._is_under_way(sequence)

    def _is_under_way(self, sequence: TokenSequence) -> bool:
        return any(sequence is one for step in self._under_way for _, one in step.rows)

    def leave(self, sequence: TokenSequence) -> list[int]:
        """Forget a sequence that has ended, and return the tokens that the caches hold of it."""
        self._chooser.forget(sequence)
        return [*sequence.ids, *self._late.pop(sequence, [])][: sequence.fed]

    def drop(self) -> None:
        """Forget the steps whose tokens were not read; their sequences have ended, so their rows stop."""
        if self._under_way:
            self._readback.drop()
        self._under_way.clear()
        self._due = ()
