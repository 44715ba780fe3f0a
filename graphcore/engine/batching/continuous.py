"""Continuous batching: requests join and leave between any two passes of graphcore's own programs.

    pass 1   A: chunk
    pass 2   A: chunk   B: chunk
    pass 3   A: token   B: token   C: chunk      a pass gives each running request a token, or a chunk of its prompt
    pass 4   A: token              C: chunk

A chunk runs as a program of its own, and its boundaries depend on the prompt alone. Decode steps run the tokens of all
other requests (host_decode_loop.py, device_decode_loop.py), each in its row of the caches. So no result of a request
depends on the others.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.interface import Batching, DecodeLoop, done_of
from graphcore.engine.batching.prompt_outputs import PromptOutputs
from graphcore.engine.forward_pass import RowChunk
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.speculation.speculation import Speculation
from graphcore.progress import Progress
from graphcore.streaming.policy import Policy, Resident, watched
from graphcore.streaming.scheduler import never


class ContinuousBatching(Batching):
    """Batching in which requests join and leave at every pass.

    Args:
        runner: the model; each running request has one row of its caches.
        decoding: decode loop of the requests.
        admission: admission of requests to the KV cache.

    Attributes:
        snapshots: copies of prefixes that the KV cache holds.
    """

    def __init__(self, runner: ProgramRunner, decoding: DecodeLoop, admission: CacheAdmission) -> None:
        self._runner, self._decoding, self._admission = runner, decoding, admission
        self._prompt_outputs = PromptOutputs(runner)
        self.snapshots = admission.snapshots

    @property
    def running(self) -> Sequence[Request]:
        """Requests that were admitted and have not left, in order of admission; some may be swapped out."""
        return self._admission.requests

    def admit(self, waiting: Sequence[Request]) -> int:
        """Swap requests in again, then admit those that wait, as far as there is room.

        While it is not known which tokens of an ended request the KV cache holds, a request that may reuse them waits,
        as do those behind it.
        """
        if not self._admission.swap_in() or not waiting:
            return 0
        is_leaving = any(request.has_ended for request in self.running)
        for admitted, request in enumerate(waiting):
            if (request.reuses_cache and is_leaving) or not self._admission.admit(request):
                return admitted
        return len(waiting)

    def resume(self, requests: Sequence[Request], cached: int) -> None:
        """Start running requests whose first `cached` tokens are in the first rows; their prompts are not shared."""
        assert not self.running, "rows are in use"
        for row, request in enumerate(requests):
            request.begin(row, cached, is_bit_exact=False)
            self._admission.requests.append(request)

    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run one token of each request that decodes, and chunks of the prompts of the others."""
        self._decoding.take_forced(self.running)
        tokens, prompts = self._work()
        decodes, stepped = self._decoding.start(tokens)
        chunks = [
            RowChunk(request.own_row, ids, request.num_computed, is_last=is_last_chunk(request, ids))
            for request, ids in prompts
        ]
        ended: list[tuple[Request, Tensor]] = []
        if decodes or chunks:
            policy = self._report(stepped, prompts, on_progress)
            # A pass over resident weights is short, and its tokens can be reused.
            stops = never if isinstance(policy, Resident) else is_stopped
            with self._runner.forward_pass(decodes, chunks, policy, stops) as states:
                for (request, _), chunk, state in zip(prompts, chunks, states, strict=True):
                    if chunk.is_last:
                        ended.append((request, state.logits))
                    if request.reads_prompt:
                        self._prompt_outputs.read(request, chunk, state.hidden)
        for request, count in (*stepped.items(), *((one, len(ids)) for one, ids in prompts)):
            is_prompt = request.is_in_prompt
            request.add_computed(count)
            if is_prompt:
                self._admission.cache_prompt(request)
                on_progress("prefill", None, request.num_computed, len(request.prompt_ids))
            self._admission.pages.free_before_window(request.own_row, request.num_computed)
            if request.pooled is not None and not request.is_in_prompt:
                request.end("end")
        if self._decoding.finish(ended):
            on_progress("generate", None, *done_of(self.running))

    @property
    def speculation(self) -> Speculation | None:
        """What is learned of draft tokens; None without speculation."""
        return self._decoding.speculation

    def page_counts(self, request: Request) -> tuple[int, int]:
        """Return the number of a request's KV-cache pages, and how many it shares with other requests."""
        row = request.cache_row
        return (0, 0) if row is None else self._admission.pages.page_counts(row)

    def leave(self) -> None:
        """Free the rows and pages of requests that have ended; the prefix cache may keep the pages."""
        for request in [one for one in self.running if one.has_ended and self._decoding.may_leave(one)]:
            self._admission.leave(request, self._decoding.leave(request))

    def fail(self, error: BaseException) -> None:
        """End all running requests with an error; the content of the caches is invalid."""
        for request in self.running:
            request.fail(error)
            request.discard_computed()
        self._decoding.drop()
        self.leave()
        self._admission.free_orphaned_rows()
        self._admission.clear_prefix_cache()

    def give_up(self) -> None:
        """End all running requests after an aborted pass; recurrent states are then invalid."""
        for request in self.running:
            request.end("interrupted")
            if self._admission.pages.has_states:
                request.discard_computed()
        self._decoding.drop()
        self.leave()

    def lend_cache(self) -> Callable[[], None]:
        """Lend the KV cache to other calls until the returned function is called."""
        return self._admission.lend_cache()

    def _work(self) -> tuple[dict[Request, list[int]], list[tuple[Request, list[int]]]]:
        """Return the requests that run a decode step, and those that run a chunk of a prompt, each with its tokens.

        Each has the pages that it needs; the oldest ones get them first.
        """
        tokens: dict[Request, list[int]] = {}
        chunks: list[tuple[Request, list[int]]] = []
        left, spare = self._runner.prompt_tokens, self._runner.programs.most_rows - len(self.running)
        for request in tuple(self.running):
            if request.has_ended or not self._admission.refresh(request):
                continue
            ids = request.next_ids(self._runner.chunks, min(1 + max(spare, 0), self._decoding.most_together))
            is_chunk = request.is_in_prompt and (len(ids) > 1 or request.reads_hidden(len(ids)))
            if is_chunk and chunks and len(ids) > left:
                continue
            is_further = is_chunk and bool(chunks)  # it can wait for the next pass
            if not self._admission.reserve(request, max(len(ids), 1), None if is_further else self._decoding):
                continue
            if is_chunk:
                chunks.append((request, ids))
                left -= len(ids)
            else:
                tokens[request] = ids
                spare -= max(0, len(ids) - 1)
        has_place = {request: ids for request, ids in tokens.items() if request.cache_row is not None}

        def reserve(request: Request, count: int) -> bool:
            end = request.num_computed + len(has_place[request]) + count
            return self._admission.pages.reserve(request.own_row, request.num_computed, end)

        for request, draft in self._decoding.drafts(has_place, spare, reserve, is_alone=not chunks).items():
            has_place[request] = [*has_place[request], *draft]
        return has_place, [(request, ids) for request, ids in chunks if request.cache_row is not None]

    def _report(
        self,
        tokens: Mapping[Request, int],
        chunks: Sequence[tuple[Request, list[int]]],
        on_progress: Progress,
    ) -> Policy:
        """Return the policy, which reports each group of a pass that moves weights."""
        if tokens:
            done, total = done_of(self.running)
            return watched(self._runner.policy, on_progress, "generate", done, total)
        request, _ = chunks[0]
        return watched(self._runner.policy, on_progress, "prefill", request.num_computed, len(request.prompt_ids))


def is_last_chunk(request: Request, ids: Sequence[int]) -> bool:
    """Return whether a token is to be sampled after a chunk of a request's prompt."""
    return request.num_uncomputed == len(ids) and request.pooled is None
