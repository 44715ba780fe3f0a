"""Passes of graphcore's own programs: sequences join and leave between any two of them.

    pass 1   A: chunk
    pass 2   A: chunk   B: chunk
    pass 3   A: token   B: token   C: chunk      a pass gives each running sequence a token, or a chunk of its prompt
    pass 4   A: token              C: chunk

A chunk runs by itself, whoever runs beside it, and its borders depend on the prompt alone; decode steps run the tokens
of all other sequences (decoding.py), each in the row of its caches. So nothing that a sequence computes depends on
others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from graphcore.engine.decoding import Decoding
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.sequence import TokenSequence
from graphcore.graph.program import Program
from graphcore.progress import Progress
from graphcore.streaming.policy import Policy, Resident, watched
from graphcore.streaming.scheduler import never, run_together


class Passes(ABC):
    """A way to run sequences together, pass by pass.

    Attributes:
        running: sequences that have a place in the caches.
    """

    running: list[TokenSequence]

    @abstractmethod
    def admit(self, waiting: Sequence[TokenSequence]) -> int:
        """Give places to the first sequences that wait, and return how many got one."""

    @abstractmethod
    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run one pass, and give each sequence that is due one its next token.

        Args:
            is_stopped: function that is asked between layer groups whether the pass is to be given up.
        """

    @abstractmethod
    def leave(self) -> None:
        """Take back the places of sequences that have ended."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End all running sequences with an error; the caches hold nothing that can be used."""

    @abstractmethod
    def give_up(self) -> None:
        """End all running sequences after a pass was given up; the caches hold a part of its tokens."""

    @abstractmethod
    def put_aside(self) -> Callable[[], None]:
        """Copy what the running sequences need out of the caches; the function that is returned puts it back."""


class ContinuousPasses(Passes):
    """Passes in which sequences join and leave at every step.

    Args:
        runner: the model; each running sequence has one row of its caches.
        decoding: way in which the sequences' tokens run.
        most_prompt_tokens: tokens of prompts in one pass; one chunk runs even if it is longer.
    """

    def __init__(self, runner: ProgramRunner, decoding: Decoding, most_prompt_tokens: int) -> None:
        self.running: list[TokenSequence] = []
        self._runner, self._decoding, self._most = runner, decoding, most_prompt_tokens
        self._held: list[list[int]] = [[] for _ in range(runner.sizes.batch_size)]

    def admit(self, waiting: Sequence[TokenSequence]) -> int:
        """Give each sequence a free row, one that holds the beginning of its prompt if it may use that.

        While it is not known what a row holds that was just left, a sequence that may use it waits, as do those behind.
        """
        taken = {sequence.cache_row for sequence in self.running}
        free = [cache_row for cache_row in range(len(self._held)) if cache_row not in taken]
        admitted = 0
        is_leaving = any(sequence.has_ended for sequence in self.running)
        for sequence in waiting[: len(free)]:
            if sequence.reuses_cache and is_leaving:
                break
            prompt = sequence.request.prompt_ids
            known = dict.fromkeys(free, 0)
            if sequence.reuses_cache:
                known = {cache_row: self._runner.reusable(self._held[cache_row], prompt) for cache_row in free}
            # Of equal rows the one that holds least, so that what may be used again stays.
            cache_row = max(free, key=lambda cache_row: (known[cache_row], -len(self._held[cache_row])))
            free.remove(cache_row)
            self._held[cache_row] = []
            sequence.begin(cache_row, known[cache_row])
            self.running.append(sequence)
            admitted += 1
        return admitted

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
            sequence.fed += count
            if is_prompt:
                on_progress("prefill", None, sequence.fed, length)
        if self._decoding.finish([(one, self._chunk_program(one.own_row).state.logits) for one in ended]):
            on_progress("generate", None, *done_of(self.running))

    def leave(self) -> None:
        """Free the rows of sequences that have ended, and note which tokens they hold."""
        for sequence in [one for one in self.running if one.has_ended and self._decoding.may_leave(one)]:
            self.running.remove(sequence)
            held = self._decoding.leave(sequence)
            self._held[sequence.own_row] = held if sequence.reuses_cache else []

    def fail(self, error: BaseException) -> None:
        """End all running sequences with an error; no row holds tokens that can be used."""
        for sequence in self.running:
            sequence.fail(error)
            sequence.fed = 0
        self._decoding.drop()
        self.leave()

    def give_up(self) -> None:
        """Take back the places after a pass was given up; rings and recurrent states hold nothing that can be used."""
        context = self._runner.sizes.context
        is_whole = all(cache.can_go_back(context) for cache in self._runner.builder.caches)
        for sequence in self.running:
            sequence.end("interrupted")
            sequence.fed = sequence.fed if is_whole else 0
        self._decoding.drop()
        self.leave()

    def put_aside(self) -> Callable[[], None]:
        """Copy the running sequences' rows; rows that are free hold nothing afterwards."""
        self._held = [[] for _ in self._held]
        return self._runner.put_aside([sequence.own_row for sequence in self.running])

    def _work(self) -> tuple[list[TokenSequence], list[tuple[TokenSequence, list[int]]]]:
        """Return the sequences that have at most one known token to run, and those that run a chunk, with it."""
        tokens: list[TokenSequence] = []
        chunks: list[tuple[TokenSequence, list[int]]] = []
        left = self._most
        for sequence in self.running:
            if sequence.has_ended:
                continue
            ids = sequence.next_ids(self._runner.sizes.prefill_chunk)
            if len(ids) <= 1:
                tokens.append(sequence)
            elif not chunks or len(ids) <= left:
                chunks.append((sequence, ids))
                left -= len(ids)
        return tokens, chunks

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


def done_of(sequences: Sequence[TokenSequence]) -> tuple[int, int]:
    """Return the new tokens of the sequence that has most to do, and how many it may have."""
    longest = max(sequences, key=lambda sequence: sequence.request.max_new_tokens)
    return len(longest.request.token_ids), longest.request.max_new_tokens
