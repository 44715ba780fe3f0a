"""Captures a decode step as one CUDA graph, or as several if weights are streamed between them.

    side stream: run the steps twice (load kernels, allocate workspaces), capture   ->   replay, replay, ...

All tensors that the steps read and write have fixed addresses: inputs in the state, weights in their slots, keys and
values in their caches, intermediate results in the graphs' shared memory pool. The warm-up computes padding only: it
sets the counts to zero and restores the inputs afterwards, so that caches and sequences do not change. The state keeps
no tensor that a capture allocated, because the next graph to be replayed may overwrite its memory in the pool.
docs/numbers.md has measurements on hardware, and lists what was not run.
"""

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from graphcore.errors import GraphcoreError, GraphError
from graphcore.graph.gpu.chunk_graphs import ChunkStep
from graphcore.graph.gpu.partition import BoundaryBuffers, Piece, cut, with_boundary_copies
from graphcore.graph.gpu.sampling import ChooseStep
from graphcore.graph.hand_over import HandedStep, HandOver, stretches, with_hand_overs
from graphcore.graph.state import StepState
from graphcore.graph.step import FusionMemory, Step
from graphcore.kernels.gpu.pdl import dependent_launches

WARMUP_RUNS = 2


@dataclass
class Captures:
    """All CUDA graphs of an engine. They share one pool, since they run one after another in one stream.

    Attributes:
        uses_pdl: True to use programmatic dependent launch (kernels/gpu/pdl.py), if the device supports it.
        seconds: seconds that warm-ups and captures took.
        nbytes: bytes of device memory that they took: pool, executable graphs, loaded kernels.
    """

    device: torch.device
    uses_pdl: bool = False
    seconds: float = 0.0
    nbytes: int = 0
    _graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    _place: "tuple[torch.cuda.Stream, torch.cuda._POOL_HANDLE] | None" = None
    _is_released: bool = False

    @property
    def num_graphs(self) -> int:
        """Number of graphs captured so far, one for each captured piece of a program."""
        return len(self._graphs)

    @property
    def stats(self) -> dict[str, int | float]:
        """Counts, seconds and bytes of the captures so far."""
        return {
            "captured_graphs": self.num_graphs,
            "captured_bytes": self.nbytes,
            "capture_seconds": self.seconds,
        }

    def capture(
        self, what: str, warm_up: Callable[[], None], run: Callable[[], None], instead: str = "graph=compiled"
    ) -> torch.cuda.CUDAGraph:
        """Run `warm_up`, then return a graph of the work that `run` enqueues, which is recorded but not executed.

        Args:
            what: description of the captured work, for messages.
            instead: setting that leaves it uncaptured.

        Raises:
            GraphError: the capture failed, or the engine was closed.
        """
        if self._is_released:
            raise GraphError(f"{what} cannot be captured: the engine is closed; load it again")
        began, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        try:
            # After a failed capture, the capture's stream would otherwise remain the current stream.
            with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
                graph = self._capture(warm_up, run)
        except GraphcoreError:
            raise
        except RuntimeError as error:
            raise GraphError(why_not(what, self.device, error, instead)) from error
        self._graphs.append(graph)
        self.nbytes += max(0, free - torch.cuda.mem_get_info(self.device)[0])
        self.seconds += time.perf_counter() - began
        return graph

    def _capture(self, warm_up: Callable[[], None], run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._place is None:
            self._place = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        side, pool = self._place
        here = torch.cuda.current_stream(self.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):  # the stream of the capture: cuBLAS has a workspace for each
            warm_up()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may call CUDA during the capture; those that fetch weights allocate pinned memory.
        with no_collection(), torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            run()
        return graph

    def release(self) -> None:
        """Free the graphs and the pool; no graph can be replayed after this."""
        self._is_released = True
        if not self._graphs:
            return
        torch.cuda.synchronize(self.device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._place = None
        torch.cuda.empty_cache()


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn the garbage collector off inside the block.

    A collection could close an abandoned engine, and its device synchronisation or unpinning would break the capture.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def why_not(what: str, device: torch.device, error: BaseException, instead: str) -> str:
    """Return the message for a capture that failed. Args: instead: setting that captures nothing of the kind."""
    first = error
    while first.__context__ is not None:  # ending a broken capture raises once more, over what broke it
        first = first.__context__
    reason = next(iter(str(first).splitlines()), "") or type(first).__name__
    if isinstance(first, torch.OutOfMemoryError):
        advice = "leave more memory free: a smaller context_length, batch_size or streaming.memory_budget"
    else:
        advice = f"use {instead}"
    return f"{what} could not be captured as a CUDA graph on {device}: {type(first).__name__}: {reason}; {advice}"


@dataclass
class CapturedStep:
    """Steps that are captured at the first replay and replayed as one graph from then on.

    Attributes:
        captures: the engine's captures.
        handed: tensors with the results of earlier pieces; the warm-up restores them.
    """

    group: int
    state: StepState
    steps: Sequence[Step]
    captures: Captures
    handed: Sequence[torch.Tensor] = ()
    graph: torch.cuda.CUDAGraph | None = field(default=None)

    def replay(self) -> None:
        """Run all steps once."""
        if self.graph is None:
            self.prepare()
        assert self.graph is not None, "prepared, but not captured"
        self.graph.replay()

    def prepare(self) -> None:
        """Capture the steps, unless they are captured already, without changing the state."""
        if self.graph is not None:
            return
        state = self.state
        made = state.hidden, state.ropes, state.per_layer
        groups = sorted({step.group for step in self.steps if not isinstance(step, ChooseStep)}) or [self.group]
        sequences, tokens = state.token_ids.shape
        what, instead = f"a decode step of {sequences} sequences", "graph=compiled"
        if tokens > 1:
            what, instead = f"a chunk of {tokens} tokens", "graph.prefill=compiled"
        what += f" (layer groups {groups[0]} to {groups[-1]})"
        with dependent_launches(self.captures.uses_pdl):
            self.graph = self.captures.capture(what, self._warm_up, self._run, instead)
        state.hidden, state.ropes, state.per_layer = made

    def _warm_up(self) -> None:
        """Run the steps on padding only, and restore the inputs that they changed."""
        state = self.state
        inputs = (state.token_ids, state.span.starts, state.span.counts, state.chosen, *self.handed)
        before = [tensor.clone() for tensor in inputs]
        state.span.counts.zero_()
        for _ in range(WARMUP_RUNS):
            self._run()
        for tensor, value in zip(inputs, before, strict=True):
            tensor.copy_(value)

    def _run(self) -> None:
        for step in self.steps:
            step.replay()


def captured(
    state: StepState,
    steps: Sequence[Step],
    streamed: Collection[int],
    boundary: BoundaryBuffers,
    captures: Captures,
    fusion: FusionMemory | None = None,
    hand_over: HandOver | None = None,
) -> list[Step]:
    """Return the steps merged into as few captured ones as streamed weights, hand-overs and steps on the host allow.

    Args:
        fusion: norm-fusion buffers of the steps, by which a piece prepares the next one's first norm.
        hand_over: this rank's hand-overs, which are in the steps; the stream is handed over in the boundary buffers.
    """
    cuts = [(one, cut(one.steps, streamed)) for one in stretches(steps)]
    pieces = [piece for _, of_cut in cuts for piece in of_cut]
    if hand_over is None and len(pieces) == 1 and pieces[0].may_capture:
        return [CapturedStep(pieces[0].group, state, steps, captures)]  # a single piece hands nothing over
    handed = (*boundary.tensors, *(() if fusion is None else fusion.tensors))
    found: list[Step] = []
    for stretch, of_cut in cuts:
        ready = [captured_piece(piece, state, boundary, captures, handed) for piece in of_cut]
        if hand_over is None:
            found += ready
        elif ready:
            ends = stretch.source, stretch.target
            found += with_hand_overs(ready, state, lambda: boundary.hidden, hand_over, *ends)
        else:
            found.append(HandedStep(0, state, None, lambda: boundary.hidden, hand_over.ranks, stretch.source))
    return found


def captured_piece(
    piece: Piece,
    state: StepState,
    boundary: BoundaryBuffers,
    captures: Captures,
    handed: Sequence[torch.Tensor],
) -> Step:
    """Return a piece between boundary buffers, captured if none of its steps needs the host."""
    whole = with_boundary_copies(piece, state, boundary)
    return CapturedStep(whole.group, state, whole.steps, captures, handed) if whole.may_capture else whole


def captured_steps(steps: Sequence[Step]) -> list[CapturedStep]:
    """Return the captured steps among steps, those between hand-overs and those of chunks included."""
    inside = (step.step if isinstance(step, HandedStep | ChunkStep) else step for step in steps)
    return [step for step in inside if isinstance(step, CapturedStep)]


def only_launches(steps: Sequence[Step]) -> bool:
    """Return whether the steps launch graphs that exist, and hand the stream over, and do nothing else."""
    found = captured_steps(steps)
    receives = sum(isinstance(step, HandedStep) and step.step is None for step in steps)
    return len(found) + receives == len(steps) and all(step.graph is not None for step in found)
