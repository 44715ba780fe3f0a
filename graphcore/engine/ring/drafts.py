"""Draft tokens on a ring: rank 0 decides what is drafted, from its own times, and the others repeat what it does.

    rank 0    pages, draft steps, ...  --calls-->  the same on every other rank
              draft tokens to check    --calls-->  the same tokens in the step

Pages are reserved by the same calls in the same order, also those that fail, because each may evict others. A draft
model's steps run round the ring as the model's do: each rank has the copies of its own layers, whose caches it has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from graphcore.engine.batching.host_decode_loop import HostDecodeLoop
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.programs import Programs
from graphcore.engine.request import Request
from graphcore.engine.ring.shared_requests import FollowedRequests, LedRequests
from graphcore.engine.sampler import SequenceSampler
from graphcore.engine.speculation.draft_steps import DraftSteps, RowTokens
from graphcore.engine.speculation.speculation import Reserve, Speculation, StepRoom
from graphcore.graph.program import Program
from graphcore.parallel.process_group import ProcessGroup


class DraftCalls:
    """Rank 0's calls while it drafts, which are told to the other ranks before a draft step, and at the end."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        self._calls: list[list[Any]] = []

    def note(self, name: str, *arguments: Any) -> None:
        """Note a call, plain data for JSON, which is told with those that follow."""
        self._calls.append([name, *arguments])

    def tell(self, name: str, *arguments: Any) -> None:
        """Tell the other ranks of a call and of those noted before."""
        self.note(name, *arguments)
        self._ranks.tell(self._calls)
        self._calls.clear()


class LeadDraftSteps(DraftSteps):
    """Decode steps of the draft model on rank 0, which tells the other ranks to run each of them."""

    def __init__(self, runner: ProgramRunner, programs: Programs, calls: DraftCalls) -> None:
        super().__init__(runner, programs)
        self._calls = calls

    def begin(self, rows: Sequence[int]) -> None:
        """As in `DraftSteps`, with all ranks."""
        self._calls.note("begin", list(rows))
        super().begin(rows)

    def run(self, tokens: RowTokens) -> dict[int, tuple[Program, int]]:
        """As in `DraftSteps`, with all ranks."""
        self._calls.tell("run", [[row, list(ids), start] for row, (ids, start) in tokens.items()])
        return super().run(tokens)

    def end(self) -> None:
        """As in `DraftSteps`, with all ranks."""
        self._calls.note("end")
        super().end()


class LeadDecodeLoop(HostDecodeLoop):
    """Rank 0's decode loop, which tells the other ranks what it drafts.

    Args:
        calls: what the other ranks are told of drafts.
        requests: requests that the other ranks know.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        speculation: Speculation | None,
        sampler: SequenceSampler,
        calls: DraftCalls,
        requests: LedRequests,
    ) -> None:
        super().__init__(runner, speculation, sampler)
        self._calls, self._requests = calls, requests

    def propose(self, room: StepRoom, reserve: Reserve) -> Mapping[Request, Sequence[int]]:
        """Return the draft tokens that the step is to check, which the other ranks then know."""

        def noted(request: Request, count: int) -> bool:
            self._calls.note("reserve", *self._requests.numbers([request]), count)
            return reserve(request, count)

        drafts = super().propose(room, noted)
        numbers = self._requests.numbers(drafts)
        self._calls.tell("check", [[number, [*ids]] for number, ids in zip(numbers, drafts.values(), strict=True)])
        return drafts


class FollowingDecodeLoop(HostDecodeLoop):
    """Decode loop of another rank than 0, which drafts what rank 0 does.

    Args:
        drafts: True if rank 0 drafts.
        requests: requests that rank 0 has told of.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        sampler: SequenceSampler,
        ranks: ProcessGroup,
        requests: FollowedRequests,
        drafts: bool,
    ) -> None:
        super().__init__(runner, sampler=sampler)
        self.has_drafts, self._ranks, self._requests = drafts, ranks, requests
        programs = runner.draft_programs
        self._steps = None if programs is None else DraftSteps(runner, programs)

    def propose(self, room: StepRoom, reserve: Reserve) -> Mapping[Request, Sequence[int]]:
        """Do what rank 0 does until it says which draft tokens the step is to check, and return them."""
        while True:
            for name, *arguments in self._ranks.hear():
                if name == "check":
                    numbers = [number for number, _ in arguments[0]]
                    return dict(zip(self._requests.of(numbers), (ids for _, ids in arguments[0]), strict=True))
                if name == "reserve":
                    (request,) = self._requests.of(arguments[:1])
                    reserve(request, arguments[1])
                else:
                    self._draft(name, *arguments)

    def _draft(self, name: str, *arguments: Any) -> None:
        """Do a call of `DraftSteps`."""
        assert self._steps is not None, "rank 0 has a draft model, so all ranks have one"
        match name:
            case "begin":
                self._steps.begin(*arguments)
            case "run":
                self._steps.run({row: (ids, start) for row, ids, start in arguments[0]})
            case "end":
                self._steps.end()
            case other:
                raise AssertionError(f"rank 0 drafts with {other!r}, which this version does not know")
