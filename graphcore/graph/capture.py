"""A decode step as one CUDA graph, or as several where weights move between them.

    side stream: run the steps twice (kernels load, workspaces settle)   ->   capture   ->   replay, replay, ...

What the steps read and write lies at fixed addresses: inputs in the state, weights in their slots, keys and values in
their caches, everything in between in the graph's own pool. The warm-up runs on no real token: counts are zero for
its time, and inputs are put back after it, so that caches and sequences stay as they are. Proved on hardware in
docs/numbers.md, or listed there as not run.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from graphcore.graph.cutting import Handover, cut, with_handover
from graphcore.graph.state import StepState
from graphcore.graph.step import Step

WARMUP_RUNS = 2


@dataclass
class GraphPool:
    """Memory that the graphs of one program share; they run one after another, and nothing in it outlives a graph."""

    graph: torch.cuda.CUDAGraph | None = None


@dataclass
class CapturedStep:
    """Steps that are captured at the first replay and replayed as one from then on.

    Attributes:
        pool: of the program's graphs.
        handed: what other steps have left for these, which the warm-up must not change.
    """

    group: int
    state: StepState
    steps: Sequence[Step]
    device: torch.device
    pool: GraphPool = field(default_factory=GraphPool)
    handed: Sequence[torch.Tensor] = ()
    graph: torch.cuda.CUDAGraph | None = field(default=None)

    def replay(self) -> None:
        """Run all steps once."""
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return the steps as a graph; nothing that they compute while being captured takes place."""
        inputs = (self.state.token_ids, self.state.span.starts, self.state.span.counts, self.state.chosen, *self.handed)
        before = [tensor.clone() for tensor in inputs]
        self.state.span.counts.zero_()
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch does not type it
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARMUP_RUNS):
                self._run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        for tensor, value in zip(inputs, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        shared = None if self.pool.graph is None else self.pool.graph.pool()
        with torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"):
            self._run()
        self.pool.graph = graph
        return graph

    def _run(self) -> None:
        for step in self.steps:
            step.replay()


def captured(
    state: StepState, steps: Sequence[Step], streamed: Collection[int], handover: Handover, device: torch.device
) -> list[Step]:
    """Return the steps as few captured ones, cut only where weights move or the host is asked."""
    pieces = cut(steps, streamed)
    if len(pieces) == 1 and pieces[0].may_capture:
        return [CapturedStep(pieces[0].group, state, steps, device)]  # nobody to hand anything to
    pool = GraphPool()
    whole = [with_handover(piece, state, handover) for piece in pieces]
    return [
        CapturedStep(piece.group, state, piece.steps, device, pool, handover.tensors) if piece.may_capture else piece
        for piece in whole
    ]
