"""Static batching: a batch starts and ends as a whole, for runners that cannot add requests to a running batch.

A transformers model has one cache, whose rows are fixed when the prompts run. Requests that arrive later wait for the
next batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from torch import Tensor

from graphcore.engine.batching.interface import Batching, done_of
from graphcore.engine.model_runner import StaticRunner
from graphcore.engine.request import Request
from graphcore.engine.sampler import SequenceSampler
from graphcore.graph.program import Program
from graphcore.progress import Progress
from graphcore.streaming.policy import watched
from graphcore.streaming.scheduler import run_together

MASK_SECONDS = 0.1  # seconds that a pass waits for masks that are late; then deadlines are checked


class StaticBatching(Batching):
    """Runs one static batch of requests after another.

    Args:
        runner: the model; request i of a batch has row i of its caches.
    """

    def __init__(self, runner: StaticRunner) -> None:
        self._begun: list[Request] = []
        self._runner = runner
        self._chooser = SequenceSampler(runner)
        self._batch: tuple[Request, ...] = ()
        self._is_new = False  # whether the batch's prompts still have to run
        self._program: Program | None = None
        self._held: list[int] = []

    @property
    def running(self) -> Sequence[Request]:
        """Requests of the batch that have not left."""
        return self._begun

    def admit(self, waiting: Sequence[Request]) -> int:
        """Start a batch of the first waiting requests that fit together, if none runs; return how many."""
        if self._batch or not waiting:
            return 0
        batch = list(takewhile(partial(self._fits, waiting[0]), waiting[: self._runner.sizes.batch_size]))
        first = batch[0]
        held, self._held = self._held, []
        prompt = first.prompt_ids
        is_one = len(batch) == 1 and first.reuses_cache
        self._begin(batch, self._runner.reusable(held, prompt) if is_one and held else 0)
        return len(batch)

    def resume(self, requests: Sequence[Request], cached: int) -> None:
        """Start a batch of requests whose first `cached` tokens are in the first rows."""
        self._begin(list(requests), cached)

    def _begin(self, batch: list[Request], cached: int) -> None:
        for row, request in enumerate(batch):
            request.begin(row, cached)
        self._batch, self._begun, self._is_new = tuple(batch), batch, True

    def _fits(self, first: Request, request: Request) -> bool:
        """Return whether a request may be in the batch of the first one."""
        lengths = len(first.prompt_ids), len(request.prompt_ids)
        return lengths[0] == lengths[1] or not self._runner.needs_equal_lengths

    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run the batch's prompts, or a token of each of its requests; while a mask is late, the whole batch waits."""
        if self._chooser.has_pending:
            self._chooser.choose_pending(MASK_SECONDS)
        elif self._is_new:
            self._is_new = False
            rows = [request.prompt_ids[request.cached :] for request in self._batch]
            logits = self._runner.extend(rows, [request.cached for request in self._batch], on_progress)
            for request in self._batch:
                request.add_computed(request.num_uncomputed)
            self._choose(logits)
        else:
            self._run_step(on_progress, is_stopped)
        on_progress("generate", None, *done_of(self._batch))

    def _run_step(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run a token of each request that has not ended, and sample the next ones."""
        if self._program is None:
            self._program = self._runner.program("decode", self._runner.width(len(self._batch)))
        rows = [[] if request.has_ended else request.token_ids[-1:] for request in self._batch]
        lasts = [request.num_known - 1 for request in self._batch]
        self._program.state.put_rows(rows, lasts)
        policy = watched(self._runner.policy, on_progress, "generate", *done_of(self._batch))
        run_together([self._program], policy, is_stopped)
        for request, ids in zip(self._batch, rows, strict=True):
            request.add_computed(len(ids))
        self._choose(self._program.state.logits[: len(rows)])

    def _choose(self, logits: Tensor) -> None:
        """Sample a token for each request of the batch, from logits [B, V]."""
        self._chooser.choose(self._batch, logits.unbind())

    def leave(self) -> None:
        """End the batch when all its requests have ended, and note which tokens row 0 holds."""
        if not self._batch or not all(request.has_ended for request in self._batch):
            return
        first = self._batch[0]
        if first.reuses_cache and len(self._batch) == 1 and not self._is_new:
            self._held = first.ids[: first.num_computed]
        self._forget_batch()

    def fail(self, error: BaseException) -> None:
        """End the batch with an error."""
        for request in self._batch:
            request.fail(error)
        self._forget_batch()

    def give_up(self) -> None:
        """End the batch after an aborted pass; the content of its rows is invalid."""
        for request in self._batch:
            request.end("interrupted")
        self._forget_batch()

    def lend_cache(self) -> Callable[[], None]:
        """Lend the KV cache to other calls; the content of rows without a request is then lost."""
        self._held = []
        held = max((request.num_computed for request in self._batch), default=0)
        return self._runner.lend_cache(range(0 if self._is_new else len(self._batch)), held)

    def _forget_batch(self) -> None:
        for request in self._batch:
            self._chooser.forget(request)
        self._batch, self._begun, self._is_new = (), [], False
        self._program = None
