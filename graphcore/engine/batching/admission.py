"""Admission to the KV cache: which requests get a row and pages, which wait, and what happens when pages run out.

    waiting  --admit-->  running  --leave-->  ended
                          |    ^
             _swap_out    v    |   swap_in
                       swapped out

Requests are admitted in their order of arrival, each when a row is free and there are pages for its prompt.

What happens when a running request needs pages and too few are free:

1. Pages that no request uses are freed: first those that only the prefix cache holds, the least recently used before
   others, then those of forward states, which are copied to the host (`PageAllocator.make_room`).
2. The request that was admitted last is swapped out for the older one, then the one before it, until there is room. Its
   pages are copied to a file (kvcache/swap_file.py) and freed.
3. If the file cannot be written, the pages are freed without a copy. The request's tokens run again later, by the
   programs that ran them before, so with the same bits. A request that continued from another one's answer would get
   other bits; its copy stays in host memory.
4. If no later request is left, the request itself waits for the next pass.

Swapped-out requests get a row again in the order of their admission, and before any request that waits is admitted. So
the oldest request always runs, and none waits for ever. No token changes.
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
from graphcore.kvcache.chunks import Chunks, common
from graphcore.kvcache.page_allocator import PageAllocator, SwappedSequence
from graphcore.kvcache.prefix_cache import PrefixCache, PrefixNode
from graphcore.kvcache.prefix_snapshot import PrefixSnapshots
from graphcore.kvcache.swap_file import SwapFile

Agree = Callable[[bool], bool]


class CacheAdmission:
    """Admits requests to the KV cache: gives them a row and pages.

    Args:
        pages: allocator of the pages.
        chunks: chunk boundaries of prompts.
        sizes: limits of the runner.
        folder: folder of the files of requests that are swapped out.
        agree: function that returns whether something has worked in all processes that make the same choices.

    Attributes:
        requests: requests that were admitted and have not left, in order of admission; some may be swapped out.
        snapshots: copies of prefixes that the KV cache holds.
    """

    def __init__(
        self, pages: PageAllocator, chunks: Chunks, sizes: RunnerSizes, folder: Path, agree: Agree = bool
    ) -> None:
        self.pages, self._chunks, self._agree = pages, chunks, agree
        self._prefixes = PrefixCache(pages, chunks, pages.snapshot_rows(sizes.batch_size))
        self.snapshots = PrefixSnapshots(pages, self._prefixes, chunks, sizes.context)
        self._rows, self._context, self._folder = sizes.batch_size, sizes.context, folder
        self.requests: list[Request] = []
        self._swapped: dict[Request, SwapFile | SwappedSequence | None] = {}  # None: tokens run again
        self._kept: dict[Request, PrefixNode] = {}  # the last whole page of its prompt that is in the prefix cache

    @classmethod
    def of(cls, runner: ProgramRunner, folder: Path, agree: Agree = bool) -> "CacheAdmission":
        """Return the admission to a runner's KV cache."""
        return cls(runner.pages, runner.chunks, runner.sizes, folder, agree)

    def admit(self, request: Request) -> bool:
        """Give a request a row and the cached prefix of its prompt; False if no row is free, or too few pages are."""
        row = self._free_row()
        if row is None:
            return False
        self.pages.free(row)
        found = (
            self._prefixes.no_hit
            if request.reads_prompt
            else self._prefixes.find(request.prompt_ids, request.reuses_cache)
        )
        if not self._prefixes.attach(row, found):  # the prefix itself has the last pages; none is free for a copy
            found = self._prefixes.no_hit
        wanted = [
            (one.own_row, self._prompt_end(one)) for one in self.requests if one.num_computed < self._prompt_end(one)
        ]
        if self.requests and not self.pages.make_room_for([*wanted, (row, self._prompt_end(request))]):
            self.pages.free(row)
            return False
        request.begin(row, found.length, is_bit_exact=found.is_bit_exact)
        self.requests.append(request)
        return True

    def refresh(self, request: Request) -> bool:
        """Repeat the prefix lookup of a request that has not run yet; return whether the request may run now.

        It has to wait while it has no row, or while an earlier request is about to compute the next page of its prompt.
        """
        if request.cache_row is None:
            return False
        prompt = request.prompt_ids
        if request.has_begun or request.num_computed >= len(prompt) or request.reads_prompt:
            return True
        found = self._prefixes.find(prompt, request.reuses_cache)
        if found.length > request.num_computed:
            self.pages.free(request.own_row)
            if not self._prefixes.attach(request.own_row, found):
                found = self._prefixes.no_hit
            request.use_cached(found.length, is_bit_exact=found.is_bit_exact)
        return not any(self._computes_for(other, request) for other in self._before(request))

    def _before(self, request: Request) -> Sequence[Request]:
        return list(islice(self.requests, self.requests.index(request)))

    def _computes_for(self, other: Request, request: Request) -> bool:
        """Return whether another request is about to compute a page that this one could continue from."""
        theirs, prompt = other.prompt_ids, request.prompt_ids
        if other.has_ended or other.cache_row is None or other.num_computed >= len(theirs) or not other.is_bit_exact:
            return False
        shared = common(theirs, prompt)
        end = min(
            self._chunks.invariant_length(len(theirs)), self._chunks.start_within(shared, len(prompt)), len(prompt) - 1
        )
        if self.pages.has_states:
            end = end // self._chunks.size * self._chunks.size
        return end > request.num_computed and end > other.num_computed

    def reserve(self, request: Request, count: int, decoding: DecodeLoop | None) -> bool:
        """Allocate pages for a request's next tokens; return False if it has to wait.

        Args:
            decoding: decode loop of later requests, which may be swapped out for this one; None swaps none out.
        """
        begin = request.num_computed
        end = min(begin + count, self._context)
        while request.cache_row is not None and not self.pages.reserve(request.own_row, begin, end):
            if decoding is None:
                return False
            later = self.requests[self.requests.index(request) + 1 :]
            last = next((one for one in reversed(later) if one.cache_row is not None and not one.has_ended), None)
            if last is None:
                decoding.drain(request)  # else a device would go on running it
                return False
            self._swap_out(last, decoding)
        return request.cache_row is not None

    def _swap_out(self, request: Request, decoding: DecodeLoop) -> None:
        """Copy a request's cache, then free its row and pages; reading its last steps first may end it."""
        decoding.drain(request)
        if request.has_ended:
            self.leave(request, decoding.leave(request))
            return
        row = request.own_row
        self._swapped[request] = self._copy_of(request) if request.num_computed else None
        self.pages.free(row)
        request.swap_out()

    def _copy_of(self, request: Request) -> SwapFile | SwappedSequence | None:
        """Return a copy of a request's cache, in memory if no file can be written; None if its tokens run again."""
        copy, file = None, None
        try:
            copy = self.pages.copy_out(request.own_row, request.num_computed)
            file = SwapFile.write(copy, self._folder)
        except OSError:
            if copy is None and not request.is_bit_exact:
                raise  # offloaded pages have no room for a copy, neither on the disk nor in memory
        if self._agree(file is not None):
            return file
        close(file)
        return None if request.is_bit_exact else copy

    def swap_in(self) -> bool:
        """Swap requests in, in order of admission, as far as there is room; return True if none is left swapped out."""
        for request in [one for one in self.requests if one in self._swapped] if self._swapped else ():
            row = self._free_row()
            if request.has_ended or row is None or not self._swap_in_one(row, request):
                return False
            del self._swapped[request]
        return True

    def _swap_in_one(self, row: int, request: Request) -> bool:
        """Swap a request into a row; False if there is no room for it and, beside others, for its next token."""
        self.pages.free(row)
        stored = self._swapped[request]
        is_alone = all(one in self._swapped for one in self.requests)
        if not is_alone and not self.pages.make_room_for([(row, request.num_known + 1)]):
            return False
        copy, error = self._read(stored)
        if error is not None and not request.is_bit_exact:
            request.fail(error)
            return False
        if copy is not None and not self.pages.copy_in(row, copy):
            return False
        close(stored)
        request.swap_in(row, 0 if copy is None else copy.tokens)
        return True

    def _read(self, stored: SwapFile | SwappedSequence | None) -> tuple[SwappedSequence | None, OSError | None]:
        """Return a copy in memory, None if tokens run again; and the error if its file cannot be read any more."""
        if not isinstance(stored, SwapFile):
            return stored, None
        copy, error = None, None
        try:
            copy = stored.read()
        except OSError as found:
            error = found
        if self._agree(error is None):
            return copy, None
        return None, error or OSError("another process cannot read its part of a sequence that was swapped out")

    def cache_prompt(self, request: Request) -> None:
        """Put the tokens of its prompt that a request has computed since the last call into the prefix cache."""
        prompt, sure, after = request.prompt_ids, self._num_sure(request), self._kept.get(request)
        if not sure:
            return
        if after is not None and (after.is_removed or after.end > sure):
            after = None
        new = prompt[after.end if after else 0 : sure]
        save_states = sure == request.num_computed and sure % self._chunks.size == 0
        kept = self._prefixes.keep(request.own_row, new, is_bit_exact=True, save_states=save_states, after=after)
        if kept is not None:
            self._kept[request] = kept

    def _num_sure(self, request: Request) -> int:
        """Return how many tokens of its prompt a request's row holds with the bits that they have in any request."""
        if not request.is_bit_exact or request.cache_row is None:
            return 0
        return min(request.num_computed, self._chunks.invariant_length(len(request.prompt_ids)))

    def leave(self, request: Request, held: Sequence[int]) -> None:
        """Free the row and pages of a finished request.

        Args:
            held: those of its tokens that the KV cache holds.
        """
        self.requests.remove(request)
        close(self._swapped.pop(request, None))
        self._kept.pop(request, None)
        if request.cache_row is None:
            return
        # From its start: pages of the tree that this row has copies of may have been evicted since.
        sure, after = request.prompt_ids[: self._num_sure(request)], None
        if sure:
            after = self._prefixes.keep(request.cache_row, sure, is_bit_exact=True, save_states=False)
        if request.reuses_cache and held:
            new = held[after.end if after else 0 :]
            self._prefixes.keep(request.cache_row, new, is_bit_exact=False, save_states=True, after=after)
        self.pages.free(request.cache_row)

    def free_orphaned_rows(self) -> None:
        """Free the pages of rows without a running request, such as one whose admission or removal raised."""
        taken = {request.cache_row for request in self.requests}
        for row in range(self._rows):
            if row not in taken:
                self.pages.free(row)

    def clear_prefix_cache(self) -> None:
        """Free all pages and snapshots of the prefix cache."""
        self._prefixes.clear()

    def lend_cache(self) -> Callable[[], None]:
        """Lend the whole KV cache to other calls until the returned function is called."""
        stack = ExitStack()
        rows = [request.own_row for request in self.requests if request.cache_row is not None]
        stack.enter_context(torch.inference_mode())
        stack.enter_context(self.pages.lending(rows))
        return stack.close

    def _prompt_end(self, request: Request) -> int:
        """Return the number of positions of a prompt and its first new token."""
        return min(len(request.prompt_ids) + 1, self._context)

    def _free_row(self) -> int | None:
        taken = {request.cache_row for request in self.requests}
        return next((row for row in range(self._rows) if row not in taken), None)


def close(stored: SwapFile | SwappedSequence | None) -> None:
    """Close the file of a copy, if it has one."""
    if isinstance(stored, SwapFile):
        stored.close()
