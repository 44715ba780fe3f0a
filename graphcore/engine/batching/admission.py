"""Admission to the KV cache: which requests get a row and pages, which wait, and what happens when pages run out.

    waiting  --admit-->  has a place  --leave-->  ended
                           |      ^
               put aside   v      |   brought back
                         in a file

Requests are admitted in their order, when there are a row and pages for their prompts. When pages run out later, those
that only the tree of prefixes has go first; then the latest request is put aside for an older one: it is copied to a
file, or, if that cannot be written, its tokens will run again as they ran before (where they began with another
request's answer, which would have other bits then, the copy stays in memory). Nobody is admitted while one is aside,
so the oldest request always goes on, and none waits for ever. No token changes.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import torch

from graphcore.engine.batching.interface import DecodeLoop
from graphcore.engine.model_runner import RunnerSizes
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.kernels.cpu.kernel_packing import DENSE_TOKENS
from graphcore.kvcache.chunks import Chunks, common
from graphcore.kvcache.page_allocator import PageAllocator, SwappedSequence
from graphcore.kvcache.prefix_cache import PrefixCache
from graphcore.kvcache.prefix_snapshot import PrefixSnapshots
from graphcore.kvcache.swap_file import SwapFile


class CacheAdmission:
    """Admission of requests to rows and pages of the KV cache.

    Args:
        pages: pages of the caches.
        chunks: chunks of prompts.
        sizes: limits of the runner.
        folder: where requests that are put aside are written.

    Attributes:
        requests: those that were admitted and have not left, in that order.
        copies: copies of beginnings that the caches hold.
    """

    def __init__(self, pages: PageAllocator, chunks: Chunks, sizes: RunnerSizes, folder: Path) -> None:
        self.pages, self.chunks = pages, chunks
        self._prefixes = PrefixCache(pages, chunks, pages.snapshot_rows(sizes.batch_size))
        self.copies = PrefixSnapshots(pages, self._prefixes, chunks, sizes.context)
        self._rows, self._context, self._folder = sizes.batch_size, sizes.context, folder
        self.requests: list[Request] = []
        self._aside: dict[Request, SwapFile | SwappedSequence | None] = {}  # None: its tokens run again

    @classmethod
    def of(cls, runner: ProgramRunner, folder: Path) -> "CacheAdmission":
        """Return the places of a runner's requests.

        The C++ kernels multiply chunks of at least `DENSE_TOKENS` tokens row by row in one way. Elsewhere a chunk's
        length may choose the kernel, so that only whole chunks are the same again.
        """
        sizes = runner.sizes
        alike = sizes.prefill_chunk if runner.library is None else DENSE_TOKENS
        return cls(runner.pages, Chunks(sizes.prefill_chunk, alike), sizes, folder)

    def admit(self, request: Request) -> bool:
        """Give a request a row, and what the caches hold of its prompt; False if there is no room for its prompt."""
        row = self._free_row()
        if row is None:
            return False
        self.pages.free(row)
        found = self._prefixes.find(request.prompt_ids, request.reuses_cache)
        if not self._prefixes.use(row, found):  # all pages are its beginning's, and none is left for a copy
            found = self._prefixes.nothing
        wanted = [
            (one.own_row, self._prompt_end(one)) for one in self.requests if one.num_computed < self._prompt_end(one)
        ]
        if self.requests and not self.pages.has_room([*wanted, (row, self._prompt_end(request))]):
            self.pages.free(row)
            return False
        request.begin(row, found.length, is_as_alone=found.is_prompt)
        self.requests.append(request)
        return True

    def bring_back(self) -> bool:
        """Give requests that are put aside their places again, as far as there is room; True if none is left aside."""
        for request in [one for one in self.requests if one in self._aside]:
            row = self._free_row()
            if request.has_ended or row is None or not self._fill(row, request):
                return False
            del self._aside[request]
        return True

    def _fill(self, row: int, request: Request) -> bool:
        """Put a request that is aside into a row, with room for its next token; False if there is none."""
        self.pages.free(row)
        kept = self._aside[request]
        is_alone = all(one in self._aside for one in self.requests)
        if not is_alone and not self.pages.has_room([(row, len(request.ids) + 1)]):
            return False
        try:
            copy = kept.read() if isinstance(kept, SwapFile) else kept
        except OSError as error:
            if not request.is_as_alone:
                request.fail(error)
                return False
            copy = None
        if copy is not None and not self.pages.copy_in(row, copy):
            return False
        close(kept)
        request.swap_in(row, 0 if copy is None else copy.tokens)
        return True

    def may_run(self, request: Request) -> bool:
        """Return whether a request has a place, and no other one computes the next page of its prompt just now.

        A prompt that has not begun goes on from what others have computed since.
        """
        if request.cache_row is None:
            return False
        prompt = request.prompt_ids
        if request.has_begun or request.num_computed >= len(prompt):
            return True
        found = self._prefixes.find(prompt, request.reuses_cache)
        if found.length > request.num_computed:
            self.pages.free(request.own_row)
            if not self._prefixes.use(request.own_row, found):
                found = self._prefixes.nothing
            request.use_cached(found.length, is_as_alone=found.is_prompt)
        return not any(self._computes_for(other, request) for other in self._before(request))

    def _before(self, request: Request) -> Sequence[Request]:
        return list(islice(self.requests, self.requests.index(request)))

    def _computes_for(self, other: Request, request: Request) -> bool:
        """Return whether another request is about to compute a page that this one could go on from."""
        theirs, prompt = other.prompt_ids, request.prompt_ids
        if other.has_ended or other.cache_row is None or other.num_computed >= len(theirs) or not other.is_as_alone:
            return False
        shared = common(theirs, prompt)
        end = min(self.chunks.sure(len(theirs)), self.chunks.start_within(shared, len(prompt)), len(prompt) - 1)
        if self.pages.has_states:
            end = end // self.chunks.size * self.chunks.size
        return end > request.num_computed and end > other.num_computed

    def reserve(self, request: Request, count: int, decoding: DecodeLoop | None) -> bool:
        """Give a request pages for its next tokens; False if it has to wait.

        Args:
            decoding: way in which later requests run, which are put aside if need be; None for none.
        """
        begin = request.num_computed
        end = min(begin + count, self._context)
        while request.cache_row is not None and not self.pages.reserve(request.own_row, begin, end):
            if decoding is None:
                return False
            later = self.requests[self.requests.index(request) + 1 :]
            last = next((one for one in reversed(later) if one.cache_row is not None and not one.has_ended), None)
            if last is None:
                decoding.settle(request)  # a device would run it on
                return False
            self._put_aside(last, decoding)
        return request.cache_row is not None

    def _put_aside(self, request: Request, decoding: DecodeLoop) -> None:
        """Take a request's place, and keep what it holds; it may end, as its last steps are read before."""
        decoding.settle(request)
        if request.has_ended:
            self.leave(request, decoding.leave(request))
            return
        row = request.own_row
        self._aside[request] = self._kept(request) if request.num_computed else None
        self.pages.free(row)
        request.swap_out()

    def _kept(self, request: Request) -> SwapFile | SwappedSequence | None:
        """Return a copy of what a request holds, in memory if no file takes it; None if its tokens can run again."""
        kept = self.pages.copy_out(request.own_row, request.num_computed)
        try:
            return SwapFile.write(kept, self._folder)
        except OSError:
            return None if request.is_as_alone else kept

    def keep_prompt(self, request: Request) -> None:
        """Let others use what a request has computed of its prompt."""
        prompt = request.prompt_ids
        sure = min(request.num_computed, self.chunks.sure(len(prompt)))
        if request.is_as_alone and request.cache_row is not None and sure:
            has_states = sure == request.num_computed and sure % self.chunks.size == 0
            self._prefixes.keep(request.cache_row, prompt[:sure], is_prompt=True, has_states=has_states)

    def leave(self, request: Request, held: Sequence[int]) -> None:
        """Free the place of a request that has ended.

        Args:
            held: tokens that the caches hold of it.
        """
        self.requests.remove(request)
        close(self._aside.pop(request, None))
        if request.cache_row is None:
            return
        if request.reuses_cache and held:
            self.keep_prompt(request)  # of a ring, what has been given back since
            self._prefixes.keep(request.cache_row, held, is_prompt=False, has_states=True)
        self.pages.free(request.cache_row)

    def forget(self) -> None:
        """Forget the beginnings of prompts that the caches hold."""
        self._prefixes.forget()

    def lend(self) -> Callable[[], None]:
        """Let others use the whole cache until the function that is returned is called."""
        stack = ExitStack()
        rows = [request.own_row for request in self.requests if request.cache_row is not None]
        stack.enter_context(torch.inference_mode())
        stack.enter_context(self.pages.lending(rows))
        return stack.close

    def _prompt_end(self, request: Request) -> int:
        """Return the positions of a prompt and its first answer."""
        return min(len(request.prompt_ids) + 1, self._context)

    def _free_row(self) -> int | None:
        taken = {request.cache_row for request in self.requests}
        return next((row for row in range(self._rows) if row not in taken), None)


def close(kept: SwapFile | SwappedSequence | None) -> None:
    """Give back the file of a copy, if it has one."""
    if isinstance(kept, SwapFile):
        kept.close()
