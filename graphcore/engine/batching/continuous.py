"""Continuous batching: sequences join and leave between any two passes of graphcore's own programs.

    pass 1   A: chunk
    pass 2   A: chunk   B: chunk
    pass 3   A: token   B: token   C: chunk      a pass gives each running sequence a token, or a chunk of its prompt
    pass 4   A: token              C: chunk

A chunk runs by itself, whatever runs beside it, and its borders depend on the prompt alone; decode steps run the tokens
of all other sequences (host_decode_loop.py, device_decode_loop.py), each in the row of its caches. So nothing that a
sequence computes depends on others.
"""

from collections.abc import Callable, Sequence

from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.interface import Batching, DecodeLoop, done_of
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import TokenSequence
from graphcore.graph.program import Program
from graphcore.progress import Progress
from graphcore.streaming.policy import Policy, Resident, watched
from graphcore.streaming.scheduler import never, run_together


class ContinuousBatching(Batching):
    """Batching in which sequences join and leave at every pass.

    Args:
        runner: the model; each running sequence has one row of its caches.
        decoding: way in which the sequences' tokens run.
        places: who has a row and pages.

    Attributes:
        copies: copies of beginnings of prompts that the caches hold.
    """

    def __init__(self, runner: ProgramRunner, decoding: DecodeLoop, places: CacheAdmission) -> None:
        self._runner, self._decoding, self._places = runner, decoding, places
        self.copies = places.copies

    @property
    def running(self) -> Sequence[TokenSequence]:
        """Sequences that were admitted and have not left, in that order; some may be put aside."""
        return self._places.sequences

    def admit(self, waiting: Sequence[TokenSequence]) -> int:
        """Give sequences that were put aside their places again, then those that wait, as far as there is room.

        While it is not known what an ended sequence leaves, one that may use it waits, as do those behind.
        """
        is_leaving = any(sequence.has_ended for sequence in self.running)
        if not self._places.bring_back():
            return 0
        for admitted, sequence in enumerate(waiting):
            if (sequence.reuses_cache and is_leaving) or not self._places.admit(sequence):
                return admitted
        return len(waiting)

    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run one token of each sequence that decodes, and chunks of the prompts of the others."""
        tokens, chunks = self._work()
        decodes, fed = self._decoding.start(tokens)
        ended = [sequence for sequence, ids in chunks if sequence.to_feed == len(ids)]
        programs = [*decodes, *(self._chunk(*chunk) for chunk in chunks)]
        if programs:
            self._runner.policy.skip([] if fed or ended else [step.group for step in self._chunk_program(0).heads])
            policy = self._report(fed, chunks, on_progress)
            # A pass over resident weights is short, and its tokens may be used again.
            try:
                run_together(programs, policy, never if isinstance(policy, Resident) else is_stopped)
            finally:
                for sequence, _ in chunks:
                    self._chunk_program(sequence.own_row).state.free_activations()
        for sequence, count in [*((sequence, 1) for sequence in fed), *((one, len(ids)) for one, ids in chunks)]:
            length = len(sequence.request.prompt_ids)
            is_prompt = sequence.fed < length
            sequence.fed, sequence.has_begun = sequence.fed + count, True
            if is_prompt:
                self._places.keep_prompt(sequence)
                on_progress("prefill", None, sequence.fed, length)
            self._places.pages.free_before_window(sequence.own_row, sequence.fed)
        if self._decoding.finish([(one, self._chunk_program(one.own_row).state.logits) for one in ended]):
            on_progress("generate", None, *done_of(self.running))

    def leave(self) -> None:
        """Free the places of sequences that have ended; what they hold may serve others."""
        for sequence in [one for one in self.running if one.has_ended and self._decoding.may_leave(one)]:
            self._places.leave(sequence, self._decoding.leave(sequence))

    def fail(self, error: BaseException) -> None:
        """End all running sequences with an error; the caches hold nothing that can be used."""
        for sequence in self.running:
            sequence.fail(error)
            sequence.fed = 0
        self._decoding.drop()
        self.leave()
        self._places.forget()

    def give_up(self) -> None:
        """Take back the places after a pass was given up; recurrent states hold nothing that can be used."""
        for sequence in self.running:
            sequence.end("interrupted")
            sequence.fed = 0 if self._places.pages.has_states else sequence.fed
        self._decoding.drop()
        self.leave()

    def put_aside(self) -> Callable[[], None]:
        """Let others use the caches until the function that is returned is called."""
        return self._places.lend()

    def _work(self) -> tuple[list[TokenSequence], list[tuple[TokenSequence, list[int]]]]:
        """Return the sequences that have at most one known token to run, and those that run a chunk, with it.

        Each has the pages that it needs; the oldest ones get them first.
        """
        tokens: list[TokenSequence] = []
        chunks: list[tuple[TokenSequence, list[int]]] = []
        left = self._runner.prompt_tokens
        for sequence in tuple(self.running):
            if sequence.has_ended or not self._places.may_run(sequence):
                continue
            ids = self._places.next_ids(sequence)
            if len(ids) > 1 and chunks and len(ids) > left:
                continue
            is_further = len(ids) > 1 and bool(chunks)  # it can wait for the next pass
            if not self._places.reserve(sequence, max(len(ids), 1), None if is_further else self._decoding):
                continue
            if len(ids) <= 1:
                tokens.append(sequence)
            else:
                chunks.append((sequence, ids))
                left -= len(ids)
        has_place = [sequence for sequence in tokens if sequence.cache_row is not None]
        return has_place, [(sequence, ids) for sequence, ids in chunks if sequence.cache_row is not None]

    def _chunk(self, sequence: TokenSequence, ids: list[int]) -> Program:
        """Return the program that runs a chunk of a prompt; its head only where the prompt ends."""
        program = self._chunk_program(sequence.own_row)
        program.state.put_rows([ids], [sequence.fed])
        return program if sequence.to_feed == len(ids) else program.without_head()

    def _chunk_program(self, cache_row: int) -> Program:
        return self._runner.programs.of_row("prefill", cache_row)

    def _report(
        self,
        tokens: Sequence[TokenSequence],
        chunks: Sequence[tuple[TokenSequence, list[int]]],
        on_progress: Progress,
    ) -> Policy:
        """Return the policy, which reports each group of a pass that moves weights."""
        if tokens:
            done, total = done_of(self.running)
            return watched(self._runner.policy, on_progress, "generate", done, total)
        sequence, _ = chunks[0]
        return watched(self._runner.policy, on_progress, "prefill", sequence.fed, len(sequence.request.prompt_ids))
