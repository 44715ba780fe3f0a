"""CUDA graphs, streams and events that are not there: a graph is what torch was asked for, run again at each replay.

As on a GPU, nothing takes place in a capture; what it makes lies at one address for the graph's whole life, and holds
nonsense between replays; values cannot be read back in it, and nothing may draw from a generator. Everything is
written down, in order, in `log`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from graphcore import Engine
from graphcore.engine.batching.new_batching import batching_of
from graphcore.graph import compile as compiling
from graphcore.kernels.backend import TritonBackend

READS = [getattr(torch.ops.aten, name).default for name in ("item", "is_nonzero", "_local_scalar_dense")]
FREE = 1 << 30  # bytes of the device before anything is captured


def tensors_in(*values: object) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(max(-(10**6), torch.iinfo(tensor.dtype).min))


@dataclass
class Call:
    """One operation of a graph, with the tensors of the capture.

    Attributes:
        made: its results; None for one that lies in memory of its arguments.
    """

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    made: list[Tensor | None]

    def run_again(self) -> None:
        out = self.function(*self.args, **self.kwargs)
        found = [out] if isinstance(out, Tensor) else tensors_in(out)
        for tensor, place in zip(found, self.made, strict=True):
            if place is not None:
                place.copy_(tensor)


class Capture(TorchDispatchMode):
    """Writes down what torch is asked for; afterwards nothing has taken place."""

    def __init__(self, graph: "FakeGraph") -> None:
        super().__init__()
        self.graph = graph
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if function in READS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if any(isinstance(leaf, torch.Generator) for leaf in tree_flatten((args, kwargs))[0]):
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
        self.keep_written(function, args, kwargs)
        out = function(*args, **kwargs)
        made, given = tensors_in(out), {address_of(tensor) for tensor in tensors_in(args, kwargs)}
        self.own |= {address_of(tensor) for tensor in made} - given
        own = [None if address_of(tensor) in given else tensor for tensor in made]
        if not function.is_view or any(tensor is not None for tensor in own):  # `contiguous` may copy
            self.graph.calls.append(Call(function, args, kwargs, own))
        return out

    def keep_written(self, function: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Keep what is about to be overwritten, if it is older than the capture."""
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in tensors_in(value):
                address = address_of(tensor)
                if address not in self.own and address not in self.before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    self.before[address] = whole, whole.clone()

    def undo(self) -> None:
        for whole, value in self.before.values():
            whole.copy_(value)


@dataclass(eq=False)
class FakeGraph:
    cuda: "FakeCuda"
    calls: list[Call] = field(default_factory=list)
    num_replays: int = 0
    is_reset: bool = False

    def replay(self) -> None:
        assert not self.is_reset, "a graph that was given back is replayed"
        assert self.calls, "a graph that was not captured is replayed"
        self.num_replays += 1
        self.cuda.log.append(f"replay {self.cuda.graphs.index(self)}")
        with _disable_current_modes():
            for call in self.calls:
                call.run_again()
            self.spoil_pool()

    def spoil_pool(self) -> None:
        """Overwrite what the graph has made, as the next graph of its pool may."""
        for call in self.calls:
            for tensor in call.made:
                if tensor is not None:
                    spoil(tensor)

    def reset(self) -> None:
        self.is_reset = True
        self.cuda.log.append(f"reset {self.cuda.graphs.index(self)}")


@dataclass(eq=False)
class FakeStream:
    cuda: "FakeCuda"
    name: str

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


@dataclass(eq=False)
class FakeEvent:
    cuda: "FakeCuda"
    name: str
    is_recorded: bool = False

    def record(self, stream: FakeStream) -> None:
        self.is_recorded = True
        self.cuda.log.append(f"{self.name} recorded in {stream.name}")

    def synchronize(self) -> None:
        assert self.is_recorded, "an event is waited for that was never recorded"
        self.cuda.log.append(f"{self.name} waited for")

    def query(self) -> bool:
        assert self.is_recorded, "an event is asked for that was never recorded"
        return True


@dataclass
class FakeCuda:
    """What stands in for torch.cuda.

    Attributes:
        log: what was asked for, in order.
        captures: pool, stream and error mode of each capture.
    """

    log: list[str] = field(default_factory=list)
    graphs: list[FakeGraph] = field(default_factory=list)
    captures: list[tuple[object, str, str]] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    num_events: int = 0
    num_pools: int = 0
    nbytes_of_a_graph: int = 1 << 20

    def __post_init__(self) -> None:
        self.current = FakeStream(self, "main")

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
        """Return what torch.cuda is from now on, as far as capturing asks for it."""
        fake = cls()
        for name in ("CUDAGraph", "Stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, f"new_{name.lower()}"))
        for name in ("graph", "stream", "device", "current_stream", "graph_pool_handle", "mem_get_info"):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: fake.log.append(name))
        return fake

    def new_cudagraph(self) -> FakeGraph:
        self.graphs.append(FakeGraph(self))
        return self.graphs[-1]

    def new_stream(self, device: object = None, priority: int = 0) -> FakeStream:
        self.streams.append(FakeStream(self, f"side {len(self.streams)}"))
        return self.streams[-1]

    def new_event(self, blocking: bool = False) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self, f"event {self.num_events - 1}")

    def current_stream(self, device: object = None) -> FakeStream:
        return self.current

    def graph_pool_handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return 0, self.num_pools

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        live = sum(not graph.is_reset for graph in self.graphs)
        return FREE - live * self.nbytes_of_a_graph, FREE

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.log.append(f"in {stream.name}")
        try:
            yield
        finally:
            self.current = before
            self.log.append(f"in {before.name}")

    @contextmanager
    def graph(self, graph: FakeGraph, pool: object, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        self.captures.append((pool, stream.name, capture_error_mode))
        self.log.append(f"capture {self.graphs.index(graph)}")
        before, self.current = self.current, stream
        capture = Capture(graph)
        try:
            with capture:
                yield
        except RuntimeError as error:  # as torch's own, which then leaves the capture's stream the current one
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from error
        self.current = before
        capture.undo()
        graph.spoil_pool()
        self.log.append(f"captured {self.graphs.index(graph)}")


class CountedOps(TorchDispatchMode):
    """Counts what torch is asked for, by name; a replay is one call, and not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.counts[str(function)] = self.counts.get(str(function), 0) + 1
        return function(*args, **(kwargs or {}))


# A driver that locks memory up to a quota, and counts.


@dataclass
class Driver:
    """Locks runs of memory up to a quota.

    Attributes:
        quota: bytes of all runs together.
        most: that were locked at once.
    """

    quota: int
    locked: dict[int, int] = field(default_factory=dict)
    most: int = 0

    def register(self, address: int, nbytes: int) -> str:
        if sum(self.locked.values()) + nbytes > self.quota:
            return "out of memory"
        self.locked[address] = nbytes
        self.most = max(self.most, sum(self.locked.values()))
        return ""

    def unregister(self, address: int) -> None:
        del self.locked[address]

    def device_address(self, address: int) -> int | None:
        return address


# Engines that decode as on CUDA, on `FakeCuda`, and the same engines eager on the CPU.

TINY = Path(__file__).parents[1] / "golden" / "tiny"
LAYERS = "streaming.layer_group_size=1"  # as on a GPU


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Return what captured engines find for CUDA from now on; nothing is compiled."""
    monkeypatch.setattr(compiling, "compile_whole", lambda function, name, is_guarded=True: function)
    return FakeCuda.install(monkeypatch)


def engine_of(name: str = "qwen3", *overrides: str) -> Engine:
    sizes = ["prefill_chunk=16", "batch_size=3", "context_length=320", *overrides]
    sizes += [LAYERS] if "streaming=on" in overrides else []
    return Engine.load(TINY / name, dtype="fp32", graph="eager", device="cpu", overrides=sizes)


def captured_engine(name: str = "qwen3", *overrides: str) -> Engine:
    engine = engine_of(name, *overrides)
    engine.runner.builder.kind, engine.runner.builder.backend = "captured", TritonBackend()
    engine._queue.batching = batching_of(engine.runner, engine.settings.cache_folder)
    return engine
