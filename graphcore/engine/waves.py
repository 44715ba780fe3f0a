"""Waves: sequences that begin together, of runners whose sequences cannot join a batch that runs.

A transformers model keeps one cache for the rows that its prompts began with. Captured graphs on a GPU choose tokens
and end rows themselves, a few steps ahead of the host. Requests that come meanwhile wait for the next wave.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from graphcore.engine.chooser import Chooser
from graphcore.engine.decode_steps import LAG, DeviceDecoding, Picked
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.passes import Passes, done_of
from graphcore.engine.sequence import TokenSequence
from graphcore.graph.program import Program
from graphcore.progress import Progress
from graphcore.streaming.policy import Policy, watched
from graphcore.streaming.scheduler import run_together


class WavePasses(Passes):
    """Passes of one wave after another.

    Args:
        runner: the model; sequence i of a wave has row i of its caches.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.running: list[TokenSequence] = []
        self._runner = runner
        self._chooser = Chooser(runner)
        self._wave: tuple[TokenSequence, ...] = ()
        self._is_new = False  # whether the wave's prompts still have to run
        self._device: DeviceDecoding | None = None
        self._program: Program | None = None
        self._taken: list[list[int]] = []  # tokens of each step, of all rows
        self._held: list[int] = []

    def admit(self, waiting: Sequence[TokenSequence]) -> int:
        """Begin a wave if none runs: as many of the first sequences as fit."""
        if self._wave or not waiting:
            return 0
        wave = list(takewhile(partial(self._fits, waiting[0]), waiting[: self._runner.sizes.batch_size]))
        first = wave[0]
        held, self._held = self._held, []
        prompt = first.request.prompt_ids
        is_one = len(wave) == 1 and first.reuses_cache
        first.begin(0, self._runner.reusable(held, prompt) if is_one and held else 0)
        for cache_row, sequence in enumerate(wave[1:], start=1):
            sequence.begin(cache_row, 0)
        self._wave, self.running, self._is_new = tuple(wave), wave, True
        return len(wave)

    def _fits(self, first: TokenSequence, sequence: TokenSequence) -> bool:
        """Return whether a sequence may be in a wave with another one."""
        lengths = len(first.request.prompt_ids), len(sequence.request.prompt_ids)
        return lengths[0] == lengths[1] or not self._runner.needs_equal_lengths

    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run the wave's prompts, or a token of each of its sequences."""
        if self._is_new:
            self._is_new = False
            rows = [sequence.request.prompt_ids[sequence.cached :] for sequence in self._wave]
            logits = self._runner.feed(rows, [sequence.cached for sequence in self._wave], on_progress)
            for sequence in self._wave:
                sequence.fed = len(sequence.request.prompt_ids)
            self._device = self._device_decoding()
            if self._device is not None:
                self._device.first(logits)
            else:
                self._chooser.choose(self._wave, logits)
        elif self._device is not None:
            while self._device.num_waiting <= LAG and self._can_use(self._device.num_waiting):
                self._device.launch(self._watched(on_progress))
        else:
            self._run_host(on_progress, is_stopped)
        if self._device is not None:
            self._hand_out(self._device.take())
        on_progress("generate", None, *done_of(self._wave))

    def _run_host(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run a token of each sequence that has not ended, and choose the next on the host."""
        width = self._runner.width(len(self._wave))
        if self._program is None:
            self._program = self._runner.program("decode", width)
        rows = [[] if sequence.has_ended else sequence.request.token_ids[-1:] for sequence in self._wave]
        lasts = [len(sequence.ids) - 1 for sequence in self._wave]
        self._program.state.put_rows(rows, lasts)
        run_together([self._program], self._watched(on_progress), is_stopped)
        for sequence, ids in zip(self._wave, rows, strict=True):
            sequence.fed = len(sequence.ids) if ids else sequence.fed
        self._chooser.choose(self._wave, self._program.state.logits[: len(rows)])

    def _watched(self, on_progress: Progress) -> Policy:
        return watched(self._runner.policy, on_progress, "generate", *done_of(self._wave))

    def _device_decoding(self) -> DeviceDecoding | None:
        """Return the wave's steps if the device chooses tokens; None if the host does."""
        wave, params = self._wave, [sequence.params for sequence in self._wave]
        program = self._runner.choosing_program(self._runner.width(len(wave)), params)
        if program is None or any(sequence.mask for sequence in wave):
            return None
        requests, most = [sequence.request for sequence in wave], [*map(self._most, wave)]
        wants_logprobs = any(sequence.wants_logprobs for sequence in wave)
        return DeviceDecoding(program, requests, params, most, wants_logprobs)

    def _most(self, sequence: TokenSequence) -> int:
        """Return the largest number of new tokens: the request's limit, or fewer if its cache is full earlier."""
        request = sequence.request
        return min(request.max_new_tokens, self._runner.sizes.context - len(request.prompt_ids) + 1)

    def _can_use(self, num_waiting: int) -> bool:
        """Return whether a sequence may still need a token beyond the `num_waiting` steps already launched."""
        running = (sequence for sequence in self._wave if not sequence.has_ended)
        return any(self._most(sequence) - len(sequence.request.token_ids) > num_waiting for sequence in running)

    def _hand_out(self, picked: Picked) -> None:
        """Give each sequence that runs its token of a step."""
        self._taken.append(picked.token_ids)
        for at, sequence in enumerate(self._wave):
            logprob = picked.logprobs[at] if picked.logprobs is not None and sequence.wants_logprobs else None
            if not sequence.has_ended:
                sequence.take(picked.token_ids[at], logprob, self._runner.sizes.context)

    def leave(self) -> None:
        """End the wave when all its sequences have ended, and note which tokens row 0 holds."""
        if not self._wave or not all(sequence.has_ended for sequence in self._wave):
            return
        first = self._wave[0]
        if first.reuses_cache and len(self._wave) == 1 and not self._is_new:
            self._held = self._held_by_device(first) if self._device is not None else first.ids[: first.fed]
        self._forget_wave()

    def _held_by_device(self, sequence: TokenSequence) -> list[int]:
        """Return the tokens that a device ran: those after the end count too, as rings lost older keys to them."""
        assert self._device is not None, "a device ran the steps"
        while self._device.num_waiting:
            self._taken.append(self._device.take().token_ids)
        chosen = [token_ids[0] for token_ids in self._taken if token_ids[0] >= 0]
        return [*sequence.request.prompt_ids, *chosen[:-1]]

    def fail(self, error: BaseException) -> None:
        """End the wave with an error."""
        for sequence in self._wave:
            sequence.fail(error)
        self._forget_wave()

    def give_up(self) -> None:
        """End the wave; its rows hold nothing that can be used."""
        for sequence in self._wave:
            sequence.end("interrupted")
        self._forget_wave()

    def put_aside(self) -> Callable[[], None]:
        """Copy the wave's part of the caches; a free row holds nothing afterwards."""
        self._held = []
        return self._runner.put_aside(range(0 if self._is_new else len(self._wave)))

    def _forget_wave(self) -> None:
        for sequence in self._wave:
            self._chooser.forget(sequence)
        self._wave, self.running, self._is_new = (), [], False
        self._device, self._program, self._taken = None, None, []
