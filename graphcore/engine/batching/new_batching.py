"""The batching of a runner: continuous for graphcore's own programs, on a ring forwarded to all ranks, else static."""

from pathlib import Path

from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.batching.device_decode_loop import DeviceDecodeLoop
from graphcore.engine.batching.host_decode_loop import HostDecodeLoop
from graphcore.engine.batching.interface import Batching, DecodeLoop
from graphcore.engine.batching.static import StaticBatching
from graphcore.engine.model_runner import ModelRunner, StaticRunner
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.ring.drafts import DraftCalls, LeadDecodeLoop, LeadDraftSteps
from graphcore.engine.ring.lead import LeadBatching, LeadSampler
from graphcore.engine.ring.lead_runner import LeadRunner
from graphcore.engine.ring.shared_requests import LedRequests
from graphcore.engine.speculation.draft_steps import DraftSteps
from graphcore.engine.speculation.prompt_lookup import LookupSpeculation
from graphcore.engine.speculation.self_speculation import SelfSpeculation
from graphcore.engine.speculation.speculation import Speculation


def batching_of(runner: ModelRunner, folder: Path, kind: str = "off") -> Batching:
    """Return the batching of a runner: continuous for graphcore's own programs, else static.

    Args:
        folder: folder of the files of requests that are swapped out.
        kind: kind of speculation.
    """
    if isinstance(runner, StaticRunner):
        return StaticBatching(runner)
    assert isinstance(runner, ProgramRunner), "sequences run in passes"
    if isinstance(runner, LeadRunner):
        return lead_batching(runner, folder, kind)
    if runner.captures is not None:
        decoding: DecodeLoop = DeviceDecodeLoop(runner)
    else:
        programs = runner.draft_programs
        steps = None if programs is None else DraftSteps(runner, programs)
        decoding = HostDecodeLoop(runner, speculation_of(runner, kind, steps))
    return ContinuousBatching(runner, decoding, CacheAdmission.of(runner, folder))


def speculation_of(runner: ProgramRunner, kind: str, steps: DraftSteps | None) -> Speculation | None:
    """Return the speculation of a kind; None for "off", or for "self" without a draft model.

    Args:
        steps: steps of the runner's draft model; None without one.
    """
    if kind == "self":
        return None if steps is None else SelfSpeculation.of(runner, steps)
    return LookupSpeculation.of(runner) if kind == "lookup" else None


def lead_batching(runner: LeadRunner, folder: Path, kind: str = "off") -> LeadBatching:
    """Return rank 0's continuous batching, which forwards each call to the other ranks; arguments of `batching_of`."""
    ranks, requests = runner.ranks, LedRequests()
    calls, programs = DraftCalls(ranks), runner.draft_programs
    steps = None if programs is None else LeadDraftSteps(runner, programs, calls)
    sampler = LeadSampler(runner, ranks, requests)
    decoding = LeadDecodeLoop(runner, speculation_of(runner, kind, steps), sampler, calls, requests)
    batching = ContinuousBatching(runner, decoding, CacheAdmission.of(runner, folder, ranks.all_agree))
    return LeadBatching(batching, sampler, ranks, requests, runner.sizes.batch_size)
