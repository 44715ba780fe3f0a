"""Static batching: sequences that begin together, of a runner whose sequences cannot join a running batch.

A transformers model keeps one cache for the rows that its prompts began with. Requests that come meanwhile wait for the
next wave.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from graphcore.engine.batching.interface import Batching, done_of
from graphcore.engine.model_runner import StaticRunner
from graphcore.engine.request import TokenSequence
from graphcore.engine.sampler import SequenceSampler
from graphcore.graph.program import Program
from graphcore.progress import Progress
from graphcore.streaming.policy import watched
from graphcore.streaming.scheduler import run_together


class StaticBatching(Batching):
    """Batching of one wave of sequences after another.

    Args:
        runner: the model; sequence i of a wave has row i of its caches.
    """

    def __init__(self, runner: StaticRunner) -> None:
        self._begun: list[TokenSequence] = []
        self._runner = runner
        self._chooser = SequenceSampler(runner)
        self._wave: tuple[TokenSequence, ...] = ()
        self._is_new = False  # whether the wave's prompts still have to run
        self._program: Program | None = None
        self._held: list[int] = []

    @property
    def running(self) -> Sequence[TokenSequence]:
        """Sequences of the wave that have not left."""
        return self._begun

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
        self._wave, self._begun, self._is_new = tuple(wave), wave, True
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
            self._chooser.choose(self._wave, logits.unbind())
        else:
            self._run_step(on_progress, is_stopped)
        on_progress("generate", None, *done_of(self._wave))

    def _run_step(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run a token of each sequence that has not ended, and choose the next ones."""
        if self._program is None:
            self._program = self._runner.program("decode", self._runner.width(len(self._wave)))
        rows = [[] if sequence.has_ended else sequence.request.token_ids[-1:] for sequence in self._wave]
        lasts = [len(sequence.ids) - 1 for sequence in self._wave]
        self._program.state.put_rows(rows, lasts)
        policy = watched(self._runner.policy, on_progress, "generate", *done_of(self._wave))
        run_together([self._program], policy, is_stopped)
        for sequence, ids in zip(self._wave, rows, strict=True):
            sequence.fed = len(sequence.ids) if ids else sequence.fed
        self._chooser.choose(self._wave, self._program.state.logits[: len(rows)].unbind())

    def leave(self) -> None:
        """End the wave when all its sequences have ended, and note which tokens row 0 holds."""
        if not self._wave or not all(sequence.has_ended for sequence in self._wave):
            return
        first = self._wave[0]
        if first.reuses_cache and len(self._wave) == 1 and not self._is_new:
            self._held = first.ids[: first.fed]
        self._forget_wave()

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
        held = max((sequence.fed for sequence in self._wave), default=0)
        return self._runner.put_aside(range(0 if self._is_new else len(self._wave)), held)

    def _forget_wave(self) -> None:
        for sequence in self._wave:
            self._chooser.forget(sequence)
        self._wave, self._begun, self._is_new = (), [], False
        self._program = None
