"""Decode steps through a GPU's kernels on a ring: fused norms end at a border, and captured pieces hand over.

Both ranks are in this process; a step runs when what it receives was sent.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.gpu_kernels import let_programs_be_few
from tiny_graph import CPU, FULL, SLIDING, builder_of, model_of
from torch import Tensor

from graphcore.graph.builder import GraphBuilder
from graphcore.graph.gpu.capture import captured_steps, only_launches
from graphcore.graph.gpu.kernel_decode import DeviceBlocks
from graphcore.graph.hand_over import HandedStep, HandOver
from graphcore.graph.program import Program
from graphcore.parallel.share import Share
from graphcore.weights.groups import LayerGroup

SPEC = model_of(FULL, SLIDING, FULL, FULL, SLIDING)
PARTITIONS = [(0, 0, 1, 1, 1), (0, 1, 1, 0, 0), (0, 0, 1, 0, 1)]
BATCH = 2


class Queue:
    """A process group that hands over in memory, by sender and receiver."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], deque[Tensor]] = {}

    def of(self, rank: int) -> Any:
        """Return a rank's end."""
        return QueueEnd(self, rank)


class QueueEnd:
    """One rank's end of a queue."""

    def __init__(self, queue: Queue, rank: int) -> None:
        self.queue, self.rank = queue, rank

    def send(self, hidden: Tensor, target: int, tag: int) -> None:
        self.queue.sent.setdefault((self.rank, target), deque()).append(hidden.clone())

    def receive(self, hidden: Tensor, source: int, tag: int) -> None:
        hidden.copy_(self.queue.sent[source, self.rank].popleft())


def ranks_of(owners: tuple[int, ...], queue: Queue, kind: str) -> list[GraphBuilder]:
    """Return the builders of both ranks."""
    found = []
    for rank in (0, 1):
        share = Share(rank, owners)
        builder = builder_of(SPEC, kind, BATCH, [LayerGroup(range(at, at + 1)) for at in sorted(share.layers)])
        builder.decoder.keep(share.layers, share.has_ends)
        builder.hand_over = HandOver(share, cast("Any", queue.of(rank)))
        found.append(with_kernels(builder))
    return found


def with_kernels(builder: GraphBuilder) -> GraphBuilder:
    """Have a builder's decode steps run on a GPU's kernels."""
    builder.functions.decode_kernels = DeviceBlocks.allocate(builder.caches, CPU)
    return builder


def run_together(programs: Sequence[Program], queue: Queue) -> Tensor:
    """Run one token of each row at position 0 of empty caches on all ranks; return rank 0's logits."""
    left = []
    for rank, program in enumerate(programs):
        program.state.token_ids.copy_(torch.tensor([[7], [11]]))
        program.state.span.starts.zero_()
        program.state.span.counts.fill_(1)
        left.append((rank, deque(program.steps)))
    while any(steps for _, steps in left):
        before = sum(len(steps) for _, steps in left)
        for rank, steps in left:
            while steps and (not waits(steps[0]) or queue.sent.get((cast("Any", steps[0]).source, rank))):
                steps.popleft().replay()
        assert sum(len(steps) for _, steps in left) < before, "all ranks wait"
    return programs[0].state.logits.clone()


def waits(step: object) -> bool:
    return isinstance(step, HandedStep) and step.source is not None


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    let_programs_be_few(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("owners", PARTITIONS)
def test_norms_are_fused_within_a_rank_s_neighbouring_layers_with_the_bits_of_one_process(
    owners: tuple[int, ...],
) -> None:
    queue = Queue()
    found = run_together([builder.token(BATCH) for builder in ranks_of(owners, queue, "eager")], queue)
    alone = with_kernels(builder_of(SPEC, "eager", BATCH)).token(BATCH)
    assert torch.equal(found, run_together([alone], queue))


@pytest.mark.parametrize(
    ("owners", "has_kernels"),
    [
        *((owners, False) for owners in PARTITIONS),
        pytest.param(PARTITIONS[1], True, marks=pytest.mark.thorough),
    ],
)
def test_captured_pieces_hand_over_what_they_have_made(
    owners: tuple[int, ...], has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, queue = FakeCuda.install(monkeypatch), Queue()
    builders = ranks_of(owners, queue, "captured")
    alone = with_kernels(builder_of(SPEC, "captured", BATCH))
    for builder in (*builders, alone):
        builder.functions.compiles = False
        builder.functions.decode_kernels = builder.functions.decode_kernels if has_kernels else None
    programs = [builder.decode(BATCH, is_greedy=False) for builder in builders]
    expected = run_together([alone.decode(BATCH, is_greedy=False)], queue)
    assert not any(only_launches(program.steps) for program in programs), "nothing is captured yet"
    first = run_together(programs, queue)
    assert torch.equal(first, expected)
    assert all(only_launches(program.steps) for program in programs)
    assert torch.equal(run_together(programs, queue), expected)
    assert sum(len(captured_steps(program.steps)) for program in programs) == len(cuda.graphs) - 1
    assert all(graph.num_replays > 0 for graph in cuda.graphs)


def test_capturing_beforehand_hands_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda.install(monkeypatch)
    queue = Queue()
    for builder in ranks_of(PARTITIONS[1], queue, "captured"):
        builder.functions.compiles, builder.functions.decode_kernels = False, None
        program = builder.decode(BATCH, is_greedy=False)
        for step in captured_steps(program.steps):
            step.prepare()
        assert only_launches(program.steps)
    assert queue.sent == {}
