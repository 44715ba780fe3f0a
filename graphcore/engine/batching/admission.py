"""Admission to the KV cache: which sequences get a row and pages, which wait, and what happens when pages run out.

    waiting  --admit-->  has a place  --leave-->  ended
                           |      ^
               put aside   v      |   brought back
                         in a file

Sequences are admitted in their order, when there are a row and pages for their prompts. When pages run out later, those
that only the tree of prefixes has go first; then the latest sequence is put aside for an older one: it is copied to a
file, or, if that cannot be written, its tokens will run again as they ran before (where they began with another
sequence's answer, which would have other bits then, the copy stays in memory). Nobody is admitted while one is aside,
so the oldest sequence always goes on, and none waits for ever. No token changes.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import torch

from graphcore.engine.batching.interface import DecodeLoop
from graphcore.engine.model_runner import RunnerSizes
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import TokenSequence
from graphcore.kernels.cpu.kernel_packing import DENSE_TOKENS
from graphcore.kvcache.chunks import Chunks, common
from graphcore.kvcache.page_allocator import PageAllocator, SwappedSequence
from graphcore.kvcache.prefix_cache import PrefixCache
from graphcore.kvcache.prefix_snapshot import PrefixSnapshots
from graphcore.kvcache.swap_file import SwapFile


class CacheAdmission:
    """Admission of sequences to rows and pages of the KV cache.

    Args:
        pages: pages of the caches.
        chunks: chunks of prompts.
        sizes: limits of the runner.
        folder: where sequences that are put aside are written.

    Attributes:
        sequences: those that were admitted and have not left, in that order.
        copies: copies of beginnings that the caches hold.
    """

    def __init__(self, pages: PageAllocator, chunks: Chunks, sizes: RunnerSizes, folder: Path) -> None:
        self.pages, self._chunks = pages, chunks
        self._prefixes = PrefixCache(pages, chunks, pages.snapshot_rows(sizes.batch_size))
        self.copies = PrefixSnapshots(pages, self._prefixes, chunks, sizes.context)
        self._rows, self._context, self._folder = sizes.batch_size, sizes.context, folder
        self.sequences: list[TokenSequence] = []
        self._aside: dict[TokenSequence, SwapFile | SwappedSequence | None] = {}  # None: its tokens run again

    @classmethod
    def of(cls, runner: ProgramRunner, folder: Path) -> "CacheAdmission":
        """Return the places of a runner's sequences.

        The C++ kernels multiply chunks of at least `DENSE_TOKENS` tokens row by row in one way. Elsewhere a chunk's
        length may choose the kernel, so that only whole chunks are the same again.
        """
        sizes = runner.sizes
        alike = sizes.prefill_chunk if runner.library is None else DENSE_TOKENS
        return cls(runner.pages, Chunks(sizes.prefill_chunk, alike), sizes, folder)

    def admit(self, sequence: TokenSequence) -> bool:
        """Give a sequence a row, and what the caches hold of its prompt; False if there is no room for its prompt."""
        row = self._free_row()
        if row is None:
            return False
        self.pages.free(row)
        found = self._prefixes.find(sequence.request.prompt_ids, sequence.reuses_cache)
        if not self._prefixes.use(row, found):  # all pages are its beginning's, and none is left for a copy
            found = self._prefixes.nothing
        wanted = [(one.own_row, self._prompt_end(one)) for one in self.sequences if one.fed < self._prompt_end(one)]
        if self.sequences and not self.pages.has_room([*wanted, (row, self._prompt_end(sequence))]):
            self.pages.free(row)
            return False
        sequence.begin(row, found.length, is_as_alone=found.is_prompt)
        self.sequences.append(sequence)
        return True

    def bring_back(self) -> bool:
        """Give sequences that are put aside their places again, as far as there is room; True if none is left aside."""
        for sequence in [one for one in self.sequences if one in self._aside]:
            row = self._free_row()
            if sequence.has_ended or row is None or not self._fill(row, sequence):
                return False
            del self._aside[sequence]
        return True

    def _fill(self, row: int, sequence: TokenSequence) -> bool:
        """Put a sequence that is aside into a row, with room for its next token; False if there is none."""
        self.pages.free(row)
        kept = self._aside[sequence]
        is_alone = all(one in self._aside for one in self.sequences)
        if not is_alone and not self.pages.has_room([(row, len(sequence.ids) + 1)]):
            return False
        try:
            copy = kept.read() if isinstance(kept, SwapFile) else kept
        except OSError as error:
            if not sequence.is_as_alone:
                sequence.fail(error)
                return False
            copy = None
        if copy is not None and not self.pages.copy_in(row, copy):
            return False
        close(kept)
        sequence.come_back(row, 0 if copy is None else copy.tokens)
        return True

    def may_run(self, sequence: TokenSequence) -> bool:
        """Return whether a sequence has a place, and no other one computes the next page of its prompt just now.

        A prompt that has not begun goes on from what others have computed since.
        """
        if sequence.cache_row is None:
            return False
        prompt = sequence.request.prompt_ids
        if sequence.has_begun or sequence.fed >= len(prompt):
            return True
        found = self._prefixes.find(prompt, sequence.reuses_cache)
        if found.length > sequence.fed:
            self.pages.free(sequence.own_row)
            if not self._prefixes.use(sequence.own_row, found):
                found = self._prefixes.nothing
            sequence.use_cached(found.length, is_as_alone=found.is_prompt)
        return not any(self._computes_for(other, sequence) for other in self._before(sequence))

    def _before(self, sequence: TokenSequence) -> Sequence[TokenSequence]:
        return list(islice(self.sequences, self.sequences.index(sequence)))

    def _computes_for(self, other: TokenSequence, sequence: TokenSequence) -> bool:
        """Return whether another sequence is about to compute a page that this one could go on from."""
        theirs, prompt = other.request.prompt_ids, sequence.request.prompt_ids
        if other.has_ended or other.cache_row is None or other.fed >= len(theirs) or not other.is_as_alone:
            return False
        shared = common(theirs, prompt)
        end = min(self._chunks.sure(len(theirs)), self._chunks.start_within(shared, len(prompt)), len(prompt) - 1)
        if self.pages.has_states:
            end = end // self._chunks.size * self._chunks.size
        return end > sequence.fed and end > other.fed

    def next_ids(self, sequence: TokenSequence) -> list[int]:
        """Return the next tokens for the caches: a chunk of a prompt, or one token."""
        prompt, begin = sequence.request.prompt_ids, sequence.fed
        if begin < len(prompt):
            return list(prompt[begin : self._chunks.end(begin, len(prompt))])
        return sequence.request.token_ids[begin - len(prompt) :][:1]

    def reserve(self, sequence: TokenSequence, count: int, decoding: DecodeLoop | None) -> bool:
        """Give a sequence pages for its next tokens; False if it has to wait.

        Args:
            decoding: way in which later sequences run, which are put aside if need be; None for none.
        """
        begin = sequence.fed
        end = min(begin + count, self._context)
        while sequence.cache_row is not None and not self.pages.reserve(sequence.own_row, begin, end):
            if decoding is None:
                return False
            later = self.sequences[self.sequences.index(sequence) + 1 :]
            last = next((one for one in reversed(later) if one.cache_row is not None and not one.has_ended), None)
            if last is None:
                decoding.settle(sequence)  # a device would run it on
                return False
            self._put_aside(last, decoding)
        return sequence.cache_row is not None

    def _put_aside(self, sequence: TokenSequence, decoding: DecodeLoop) -> None:
        """Take a sequence's place, and keep what it holds; it may end, as its last steps are read before."""
        decoding.settle(sequence)
        if sequence.has_ended:
            self.leave(sequence, decoding.leave(sequence))
            return
        row = sequence.own_row
        self._aside[sequence] = self._kept(sequence) if sequence.fed else None
        self.pages.free(row)
        sequence.go_aside()

    def _kept(self, sequence: TokenSequence) -> SwapFile | SwappedSequence | None:
        """Return a copy of what a sequence holds, in memory if no file takes it; None if its tokens can run again."""
        kept = self.pages.copy_out(sequence.own_row, sequence.fed)
        try:
            return SwapFile.write(kept, self._folder)
        except OSError:
            return None if sequence.is_as_alone else kept

    def keep_prompt(self, sequence: TokenSequence) -> None:
        """Let others use what a sequence has computed of its prompt."""
        prompt = sequence.request.prompt_ids
        sure = min(sequence.fed, self._chunks.sure(len(prompt)))
        if sequence.is_as_alone and sequence.cache_row is not None and sure:
            has_states = sure == sequence.fed and sure % self._chunks.size == 0
            self._prefixes.keep(sequence.cache_row, prompt[:sure], is_prompt=True, has_states=has_states)

    def leave(self, sequence: TokenSequence, held: Sequence[int]) -> None:
        """Free the place of a sequence that has ended.

        Args:
            held: tokens that the caches hold of it.
        """
        self.sequences.remove(sequence)
        close(self._aside.pop(sequence, None))
        if sequence.cache_row is None:
            return
        if sequence.reuses_cache and held:
            self.keep_prompt(sequence)  # of a ring, what has been given back since
            self._prefixes.keep(sequence.cache_row, held, is_prompt=False, has_states=True)
        self.pages.free(sequence.cache_row)

    def forget(self) -> None:
        """Forget the beginnings of prompts that the caches hold."""
        self._prefixes.forget()

    def lend(self) -> Callable[[], None]:
        """Let others use the whole cache until the function that is returned is called."""
        stack = ExitStack()
        rows = [sequence.own_row for sequence in self.sequences if sequence.cache_row is not None]
        stack.enter_context(torch.inference_mode())
        stack.enter_context(self.pages.lending(rows))
        return stack.close

    def _prompt_end(self, sequence: TokenSequence) -> int:
        """Return the positions of a prompt and its first answer."""
        return min(len(sequence.request.prompt_ids) + 1, self._context)

    def _free_row(self) -> int | None:
        taken = {sequence.cache_row for sequence in self.sequences}
        return next((row for row in range(self._rows) if row not in taken), None)


def close(kept: SwapFile | SwappedSequence | None) -> None:
    """Give back the file of a copy, if it has one."""
    if isinstance(kept, SwapFile):
        kept.close()
