"""Saved caches on a ring: each rank saves and loads the part of its own layers, on its own machine.

    rank 0   FILE            rank 1   FILE.rank1            rank 2   FILE.rank2            ...

    between two passes, on all ranks   begin: copy out       outcome, again and again       finish: rename, or copy in
    in a thread of each rank                          write or read the file

Passes go on while files are written or read. A file gets its name when all ranks have written theirs, and keeps it if
all have got theirs. It has its rank's layers in its fingerprint, so that other shares of the layers refuse it.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from graphcore.engine.arguments import token_row
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.queue import RequestQueue
from graphcore.engine.saved_caches import SavedCaches
from graphcore.errors import ConfigError, GraphcoreError, ParallelError, ThreadLimitError
from graphcore.kvcache.prefix_snapshot import PrefixSnapshot, PrefixSnapshots
from graphcore.kvcache.snapshot_file import UnfinishedCache, read_cache
from graphcore.parallel.process_group import ProcessGroup, SharedConfigError
from graphcore.progress import Progress
from graphcore.threads import ThreadPool

Fingerprint = Callable[[], Mapping[str, str]]
POLLS = (0.01, 1.0)  # seconds between the first two questions whether all ranks are ready, and between late ones


class CacheParts:
    """This rank's parts of saved caches.

    Attributes:
        copies: copies of this rank's part of prefixes that the KV cache holds.
    """

    def __init__(self, ranks: ProcessGroup, copies: PrefixSnapshots) -> None:
        self._ranks, self.copies = ranks, copies
        self._jobs: dict[int, Future[UnfinishedCache | PrefixSnapshot]] = {}
        self._thread = ThreadPool(1, "graphcore-caches")

    def do(self, message: Mapping[str, Any], fingerprint: Fingerprint) -> Any:
        """Do one step of saving or loading a cache, between two passes; all ranks do the same ones in the same order.

        Args:
            message: "step", "job" (its number) and, in the first step, "file" and the token "ids" of a prompt to save.
            fingerprint: function that returns the fingerprint of this rank's caches; called in a thread.

        Returns:
            What the method of the step returns.

        Raises:
            ParallelError: a rank was lost.
        """
        job = message["job"]
        match message["step"]:
            case "save":
                return self._save(job, message["ids"], self._file(message), fingerprint)
            case "load":
                path, copies = self._file(message), self.copies
                self._begin(job, lambda: read_cache(path, copies, fingerprint()))
                return True
            case "outcome":
                return self._outcome(job)
            case "finish":
                return self._finish(job)
            case "end":
                return self.end(job)
            case other:
                raise AssertionError(f"rank 0 says {other!r}, which this version does not know")

    def ids(self, job: int) -> Sequence[int]:
        """Return the token ids of a cache that was read."""
        copy = self._jobs[job].result()
        assert isinstance(copy, PrefixSnapshot), "the job reads a file"
        return copy.ids

    def check(self, job: int) -> None:
        """Raise the error of this rank's part, if there is one."""
        self._jobs[job].result()

    def end(self, job: int) -> None:
        """Remove what a job has left, and forget it."""
        future = self._jobs.pop(job, None)
        if future is not None and not future.cancel():
            future.add_done_callback(_drop)

    def close(self) -> None:
        """End all jobs, and wait until their files are gone."""
        for job in [*self._jobs]:
            self.end(job)
        self._thread.shutdown()

    def _file(self, message: Mapping[str, Any]) -> Path:
        """Return the path of this rank's file of a saved cache."""
        rank = self._ranks.rank
        return Path(message["file"] if rank == 0 else f"{message['file']}.rank{rank}")

    def _save(self, job: int, ids: Sequence[int], path: Path, fingerprint: Fingerprint) -> bool:
        """Begin to save a prompt's prefix; return False, as all ranks do, if its pages are not there any more."""
        copies, copied = self.copies, Future[PrefixSnapshot]()
        try:
            copy = copies.copy_out(ids)
        except (MemoryError, RuntimeError) as error:  # torch's, too, if there is no memory
            copied.set_exception(ConfigError(f"{path}: there is too little memory for a copy of the cache: {error}"))
        else:
            if copy is None:
                return False
            copied.set_result(copy)
        self._begin(job, lambda: UnfinishedCache.write(path, copied.result(), copies, fingerprint()))
        return True

    def _begin(self, job: int, work: Callable[[], UnfinishedCache | PrefixSnapshot]) -> None:
        """Do a job in the thread. If that cannot be started, the job has failed, which all ranks then hear of."""
        try:
            self._jobs[job] = self._thread.submit(work)
        except ThreadLimitError as error:
            self._jobs[job] = Future()
            self._jobs[job].set_exception(error)

    def _outcome(self, job: int) -> list[str] | None:
        """Return the error of each rank, empty where there is none; None while one is still writing or reading.

        Ranks that have read other prompts have an error, too.
        """
        future = self._jobs[job]
        said = self._ranks.all_say([*_result_of(future)] if future.done() else None)
        if None in said:
            return None
        first = said[0][1]
        other = "it has another prompt than rank 0; save the cache again"
        return [error or ("" if held == first else other) for error, held in said]

    def _finish(self, job: int) -> bool:
        """Give the file of every rank its name, or put what was read into the caches; return whether there was room.

        Raises:
            ConfigError: a file cannot get its name; the others do not keep theirs.
            ParallelError: a rank was lost; this one's file does not keep its name.
        """
        done, error = self._jobs[job].result(), ""
        if isinstance(done, PrefixSnapshot):
            return self.copies.copy_in(done)
        try:
            done.rename()
        except ConfigError as refused:
            error = str(refused)
        try:
            errors = self._ranks.all_say(error)
        except ParallelError:  # a rank was lost, which may not have renamed its own
            done.take_back()
            raise
        if any(errors):
            refuse_parts(errors, self._ranks.all_say(done.take_back()), SharedConfigError)
        return True


def _result_of(future: Future[UnfinishedCache | PrefixSnapshot]) -> tuple[str, str]:
    """Return the error of a job, empty if there is none, and a hash of the prompt that was read."""
    error = future.exception()
    if error is not None:
        return str(error) or type(error).__name__, ""
    copy = future.result()
    if isinstance(copy, UnfinishedCache):
        return "", ""
    held = json.dumps([*copy.ids, *copy.shape.firsts, *copy.shape.positions])
    return "", hashlib.sha256(held.encode()).hexdigest()


def _drop(future: Future[UnfinishedCache | PrefixSnapshot]) -> None:
    if future.exception() is None and isinstance(done := future.result(), UnfinishedCache):
        done.drop()


def refuse_parts(errors: Sequence[str], left: Sequence[str] = (), kind: type[ConfigError] = ConfigError) -> None:
    """Check that no rank has an error.

    Args:
        left: by rank, what could not be undone; empty where there is nothing.
        kind: class of the error.

    Raises:
        ConfigError: one has; the message names it if it is not rank 0, and says what is left.
    """
    for rank, error in enumerate(errors):
        if error:
            files = "".join(f"; on rank {at}, {one}" for at, one in enumerate(left) if one)
            raise kind((error if rank == 0 else f"rank {rank}: {error}") + files)


class LeadJob:
    """A cache that rank 0 saves or loads, step by step, with all ranks.

    Args:
        run_alone: function that runs another one between two passes, and returns its result.

    Attributes:
        number: number of the job.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        ranks: ProcessGroup,
        parts: CacheParts,
        fingerprint: Mapping[str, str],
        run_alone: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._ranks, self._parts, self._fingerprint, self._run_alone = ranks, parts, fingerprint, run_alone
        self.number = next(self._numbers)

    def step(self, name: str, **more: Any) -> Any:
        """Do a step of `CacheParts.do` on all ranks; errors are those of that step."""
        message = {"call": "cache", "step": name, "job": self.number, **more}

        def work() -> Any:
            self._ranks.tell(message)
            with self._ranks.leaving_on_error():
                return self._parts.do(message, lambda: self._fingerprint)

        return self._run_alone(work)

    def wait(self) -> None:
        """Wait until all ranks have written or read their files; forward passes continue meanwhile.

        Raises:
            ConfigError: a rank could not; the message names it.
            GraphcoreError: the error of rank 0.
        """
        pause, most = POLLS
        while (errors := self.step("outcome")) is None:
            time.sleep(pause)
            pause = min(2 * pause, most)
        self._parts.check(self.number)
        refuse_parts(errors)

    def end(self) -> None:
        """Remove on all ranks what the job has left."""
        try:
            self.step("end")
        except GraphcoreError:  # the engine is closed, or has failed: so end the other ranks
            self._parts.end(self.number)


class LeadCaches(SavedCaches):
    """Rank 0's saved caches, with those of all ranks.

    Args:
        parts: parts of rank 0.
    """

    def __init__(
        self, name: str, loaded: LoadedModel, parts: CacheParts, scheduler: RequestQueue, on_progress: Progress
    ) -> None:
        super().__init__(name, loaded, parts.copies, scheduler, on_progress)
        assert loaded.ranks is not None, "rank 0 of a ring"
        self._ranks, self._parts = loaded.ranks, parts

    def _write(self, ids: Sequence[int], path: Path, fingerprint: dict[str, str]) -> bool:
        with self._job(fingerprint) as job:
            has_begun: bool = job.step("save", ids=list(ids), file=str(path.absolute()))
            if has_begun:
                job.wait()
                job.step("finish")
            return has_begun

    def _read(self, path: Path, fingerprint: dict[str, str]) -> tuple[int, bool]:
        with self._job(fingerprint) as job:
            job.step("load", file=str(path.absolute()))
            job.wait()
            ids = self._parts.ids(job.number)
            token_row(ids, self._loaded.config.vocab_size)
            return len(ids), job.step("finish")

    @contextmanager
    def _job(self, fingerprint: Mapping[str, str]) -> Iterator[LeadJob]:
        run_alone = partial(self._queue.run_alone, self._name, lends=False)
        job = LeadJob(self._ranks, self._parts, fingerprint, run_alone)
        try:
            yield job
        finally:
            job.end()
