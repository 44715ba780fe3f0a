"""A whole decode step as one CUDA graph.

    side stream: run the steps twice (kernels load, workspaces settle)   ->   capture   ->   replay, replay, ...

What the steps read and write lies at fixed addresses: inputs in the state, weights in their slots, keys and values in
their caches, everything in between in the graph's own pool. The warm-up runs on no real token: counts are zero for
its time, and inputs are put back after it, so that caches and sequences stay as they are. Proved on hardware in
docs/numbers.md, or listed there as not run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from graphcore.graph.state import StepState
from graphcore.graph.step import Step

WARMUP_RUNS = 2


@dataclass
class CapturedStep:
    """Steps that are captured at the first replay and replayed as one from then on."""

    group: int
    state: StepState
    steps: Sequence[Step]
    device: torch.device
    graph: torch.cuda.CUDAGraph | None = field(default=None)

    def replay(self) -> None:
        """Run all steps once."""
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return the steps as a graph; nothing that they compute while being captured takes place."""
        inputs = (self.state.token_ids, self.state.span.starts, self.state.span.counts, self.state.chosen)
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
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._run()
        return graph

    def _run(self) -> None:
        for step in self.steps:
            step.replay()
