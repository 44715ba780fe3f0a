"""The ranks other than 0: they do what rank 0 tells them, with the layers that they have, until it closes."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphcore.config.settings import Settings
from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.cache_fingerprint import fingerprint_of
from graphcore.engine.loading.load_model import load_model
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.ring.drafts import FollowingDecodeLoop
from graphcore.engine.ring.rank_times import PassClock
from graphcore.engine.ring.saved_parts import CacheParts, Fingerprint
from graphcore.engine.ring.shared_requests import FollowedRequests
from graphcore.engine.sampler import SequenceSampler
from graphcore.parallel.process_group import CLOSE, ProcessGroup, SharedConfigError
from graphcore.progress import Progress, ignore_progress
from graphcore.streaming.scheduler import never


class FollowingSampler(SequenceSampler):
    """A sampler that takes rank 0's tokens: this rank has no logits."""

    def __init__(self, runner: ModelRunner, ranks: ProcessGroup, requests: FollowedRequests) -> None:
        super().__init__(runner)
        self._ranks, self._requests = ranks, requests

    def choose(self, requests: Sequence[Request], logits: Sequence[Tensor]) -> None:
        """Do nothing; `share` brings the tokens."""

    def take_likeliest(self, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
        """Do nothing; `share` brings the tokens."""

    def share(self) -> None:
        """Wait for the tokens that rank 0 has sampled, and append them."""
        self._requests.apply(self._ranks.hear())


class Follower:
    """A rank that follows rank 0.

    Args:
        folder: folder of the files of requests that are swapped out.
        drafts: True if rank 0 drafts.
        fingerprint: function that returns the fingerprint of this rank's caches.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        ranks: ProcessGroup,
        folder: Path,
        drafts: bool = False,
        fingerprint: Fingerprint = dict,
    ) -> None:
        self._fingerprint = fingerprint
        self._runner, self._ranks, self._requests = runner, ranks, FollowedRequests()
        sampler = FollowingSampler(runner, ranks, self._requests)
        decoding = FollowingDecodeLoop(runner, sampler, ranks, self._requests, drafts)
        self._batching = ContinuousBatching(runner, decoding, CacheAdmission.of(runner, folder, ranks.all_agree))
        self._clock, self._caches = PassClock(ranks), CacheParts(ranks, self._batching.snapshots)
        self._give_back: Callable[[], None] = lambda: None

    @torch.inference_mode()
    def follow(self) -> None:
        """Do what rank 0 says until it closes.

        Raises:
            ParallelError: a rank was lost.
        """
        try:
            while (message := self._ranks.hear())["call"] != CLOSE:
                self._requests.add(message.get("new", ()))
                self._requests.apply(message.get("changes", ()))
                self._do(message)
        finally:
            self._caches.close()

    def _do(self, message: dict[str, Any]) -> None:
        batching, requests = self._batching, self._requests.of(message.get("requests", ()))
        match message["call"]:
            case "admit":
                batching.admit(requests)
            case "resume":
                batching.resume(requests, message["cached"])
            case "run":
                with self._clock.measured(exchanges=message["exchanges"]):
                    batching.run(ignore_progress, never)
            case "leave":
                for request in self._requests.of(message["rowless"]):
                    request.swap_out()
                batching.leave()
                self._requests.forget(batching.running)
            case "beat":
                self._ranks.beat()
            case "lend_cache":
                self._give_back = batching.lend_cache()
            case "give_back_cache":
                self._give_back()
            case "cache":
                with suppress(SharedConfigError):  # rank 0's caller gets it
                    self._caches.do(message, self._fingerprint)
            case call:
                with suppress(SharedConfigError):  # rank 0's caller gets it; at another error this rank leaves
                    self._run_alone(call, message)

    def _run_alone(self, call: str, message: dict[str, Any]) -> None:
        """Run a call of rank 0's runner (lead_runner.py) between two passes."""
        match call:
            case "warm_up":
                self._runner.warm_up(message["sequences"])
            case "extend":
                self._runner.extend(message["rows"], message["starts"])
            case "logits":
                self._runner.logits(message["rows"])
            case "logit_slices":
                for _ in self._runner.logit_slices(message["token_ids"], message["first"]):
                    pass
            case other:
                raise AssertionError(f"rank 0 says {other!r}, which this version does not know")


def follow(
    settings: Settings, on_progress: Progress = ignore_progress, on_loaded: Callable[[], None] = lambda: None
) -> None:
    """Load this rank's layers and follow rank 0 until it closes its engine.

    Args:
        on_progress: callback while the layers are loaded, as for `Engine.load`.
        on_loaded: function that is called when they are.

    Raises:
        GraphcoreError: a setting, the checkpoint or the machine stands in the way, here or on another rank, or a rank
            was lost.
    """
    loaded = load_model(settings, on_progress)
    runner, ranks = loaded.runner, loaded.ranks
    assert isinstance(runner, ProgramRunner), "ranks run graphcore's own programs"
    assert ranks is not None, "a rank has a process group"
    try:
        with ranks.leaving_on_error():
            on_loaded()
            loaded.enter_thread()
            kind = loaded.runtime.speculation
            drafts = kind == "lookup" or (kind == "self" and runner.draft_programs is not None)
            fingerprint = partial(fingerprint_of, loaded, runner, ignore_progress)
            Follower(runner, ranks, settings.swap_folder, drafts, fingerprint).follow()
    finally:
        loaded.give_back()
