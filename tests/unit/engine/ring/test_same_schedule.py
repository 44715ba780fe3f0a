"""A follower that hears what rank 0 says makes the same choices: pages, prefixes, rows, who runs and who waits.

Both have all layers here and no process group, so that their whole state can be compared after every message.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.engine_fakes import KnownAnswers
from support.tiny_models import save_tiny

from graphcore import Engine
from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.batching.new_batching import speculation_of
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.ring.drafts import DraftCalls, LeadDecodeLoop, LeadDraftSteps
from graphcore.engine.ring.follow import Follower
from graphcore.engine.ring.lead import LeadBatching, LeadSampler
from graphcore.engine.ring.shared_requests import LedRequests
from graphcore.kvcache.prefix_cache import PrefixNode
from graphcore.parallel.process_group import CLOSE, ProcessGroup
from graphcore.progress import ignore_progress
from graphcore.streaming.scheduler import never
from graphcore.tokenizer.text_stream import StopStrings

pytestmark = pytest.mark.thorough

SIZES = ["batch_size=4", "prefill_chunk=16", "context_length=64", "batching.cache_tokens=64", "threads=1"]


SOME_FAIL = (False, True, False, False)


class Wire:
    """Messages as they go through JSON, and the answers of all ranks to what they are asked.

    Args:
        answers: what all ranks agree on, in turn; True when there are no more.
    """

    def __init__(self, answers: Sequence[bool] = ()) -> None:
        self.messages: list[Any] = []
        self.states: list[Any] = []
        self._answers, self._at = list(answers), 0
        self.waited, self.limit = 0.0, None

    def all_say(self, said: Any) -> list[Any]:
        """Return what this rank says."""
        return [said]

    def tell(self, message: Any) -> None:
        """Keep a message."""
        self.messages.append(json.loads(json.dumps(message)))

    def all_agree(self, is_true: bool) -> bool:
        """Return the next answer."""
        answer = self._answers[self._at] if self._at < len(self._answers) else True
        self._at += 1
        return is_true and answer

    def leaving_on_error(self) -> Any:
        """Return a block that does nothing."""
        return nullcontext()


class Replay(Wire):
    """What a follower hears: a leader's messages."""

    def __init__(self, led: Wire, answers: Sequence[bool]) -> None:
        super().__init__(answers)
        self._left = [*led.messages, {"call": CLOSE}]

    def hear(self) -> Any:
        """Return the next message."""
        return self._left.pop(0)


class NotingFollower(Follower):
    """A follower that notes its state before each call."""

    states: list[Any]

    def _do(self, message: dict[str, Any]) -> None:
        self.states.append(state_of(self._batching))
        super()._do(message)


def state_of(batching: ContinuousBatching) -> Any:
    """Return all that a scheduler's choices have led to."""
    admission = batching._admission
    tables = [[dict(row) for row in table.rows] for table in admission.pages.tables]
    free = [sorted(table._free) for table in admission.pages.tables]
    requests = [
        (list(one.prompt_ids), list(one.token_ids), one.finish_reason, one.cache_row, one.num_computed, one.cached)
        for one in admission.requests
    ]
    swapped = [admission.requests.index(one) for one in admission._swapped]
    idle = [[*table.idle] for table in admission.pages.tables]  # in the order in which they are evicted
    return tables, free, idle, requests, swapped, list(prefixes(admission._prefixes._root))


def drafted_tokens(messages: Sequence[Any]) -> int:
    """Return how many draft tokens the messages say."""
    calls = [call for message in messages if isinstance(message, list) for call in message]
    return sum(len(ids) for name, *arguments in calls if name == "check" for _, ids in arguments[0])


def prefixes(node: PrefixNode) -> Iterator[Any]:
    """Yield the nodes below one, with their pages and snapshots."""
    for child in node.children.values():
        yield child.tokens, list(child.pages), child.snapshot, child.is_bit_exact
        yield from prefixes(child)


def led_by(runner: ProgramRunner, wire: Wire, folder: Path, kind: str) -> tuple[LeadBatching, ContinuousBatching]:
    """Return rank 0's batching over a wire, and the scheduler in it."""
    ranks, requests = cast("ProcessGroup", wire), LedRequests()
    sampler, calls = LeadSampler(runner, ranks, requests), DraftCalls(ranks)
    programs = runner.draft_programs
    steps = None if programs is None else LeadDraftSteps(runner, programs, calls)
    decoding = LeadDecodeLoop(runner, speculation_of(runner, kind, steps), sampler, calls, requests)
    admission = CacheAdmission.of(runner, folder, wire.all_agree)
    inner = ContinuousBatching(runner, decoding, admission)
    return LeadBatching(inner, sampler, ranks, requests, runner.sizes.batch_size), inner


@torch.inference_mode()
def run_requests(lead: LeadBatching, inner: ContinuousBatching, wire: Wire, seed: int) -> int:
    """Run random requests, some of which share prefixes, reuse caches or are cancelled; return how many were admitted.

    The state before each message that is a call goes to the wire.
    """
    chance = random.Random(seed)
    tell = wire.tell

    def noting(message: Any) -> None:
        if isinstance(message, dict):
            wire.states.append(state_of(inner))
        tell(message)

    wire.tell = noting  # type: ignore[method-assign]
    stem = [chance.randrange(1, 90) for _ in range(40)]
    waiting: list[Request] = []
    admitted = 0
    for _ in range(60):
        if chance.random() < 0.4:
            own = [chance.randrange(1, 90) for _ in range(chance.randrange(1, 10))]
            prompt = stem[: chance.randrange(24)] + own
            new, reuses = chance.randrange(1, 30), chance.random() < 0.3
            waiting.append(Request(prompt, new, frozenset(), None, StopStrings([]), reuses_cache=reuses))
        for request in lead.running:
            if chance.random() < 0.02:
                request.cancel()
            if request.is_unwanted:
                request.end("interrupted")
        lead.leave()
        count = lead.admit(waiting)
        admitted += count
        del waiting[:count]
        if lead.running:
            lead.run(ignore_progress, never)
        lead.leave()
    return admitted


@pytest.fixture(scope="module", params=["llama3", "gemma3", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family's folder: all positions, windows, recurrent states."""
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param)).folder


@pytest.mark.parametrize(
    ("seed", "kind", "answers"),
    [
        pytest.param(1, "off", (), id="files"),
        pytest.param(2, "off", SOME_FAIL, id="some files fail elsewhere"),
        pytest.param(1, "lookup", SOME_FAIL, id="lookup, some files fail elsewhere"),
        pytest.param(2, "self", (), id="self, files"),
    ],
)
def test_a_follower_has_rank_0_s_state_before_every_call(
    folder: Path, seed: int, kind: str, answers: Sequence[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KnownAnswers().patch(monkeypatch.setattr)
    drafts = [] if kind == "off" else [f"speculation={kind}", "speculation.num_speculative_tokens=5"]
    with (
        Engine.load(folder, dtype="fp32", device="cpu", overrides=[*SIZES, *drafts]) as first,
        Engine.load(folder, dtype="fp32", device="cpu", overrides=[*SIZES, *drafts]) as second,
    ):
        assert isinstance(first.runner, ProgramRunner)
        assert isinstance(second.runner, ProgramRunner)
        wire = Wire(answers)
        lead, inner = led_by(first.runner, wire, tmp_path, kind)
        assert run_requests(lead, inner, wire, seed) > 10
        swapped = [state[3] for state in wire.states]
        assert any(swapped), "nothing was swapped out"
        assert drafted_tokens(wire.messages) > 20 or kind == "off"
        follower = NotingFollower(second.runner, cast("ProcessGroup", Replay(wire, answers)), tmp_path, kind != "off")
        follower.states = []
        follower.follow()
        for number, (led, followed) in enumerate(zip(wire.states, follower.states, strict=True)):
            assert led == followed, f"before call {number}, {wire.messages[number]}"
        assert state_of(inner) == state_of(follower._batching)


def test_a_request_that_other_ranks_know_ends_between_passes() -> None:
    request = Request([1, 2], 5, frozenset(), None, StopStrings([]))
    requests = LedRequests()
    requests.describe([request])
    request.cancel()
    assert not request.has_ended
    assert request.is_unwanted
    request.end("interrupted")  # what the queue does before the next pass
    assert requests.changes() == [(0, [], "interrupted")]
    assert requests.changes() == []
    alone = Request([1, 2], 5, frozenset(), None, StopStrings([]))
    alone.cancel()
    assert alone.finish_reason == "interrupted"
