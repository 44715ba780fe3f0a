"""Tests of a GPU's kernels: where they run, and decode steps that go through them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.gpu.kernel_decode import DeviceBlocks
from graphcore.kernels.gpu.experts import few_tokens
from graphcore.kernels.gpu.products import dense
from graphcore.kvcache.buffers import KVCache, LayerCache, RecurrentCache

# Tests of kernels know no device: without a GPU Triton's interpreter runs the kernels on CPU memory. With one, each
# launch gets copies on the device of the memory that its tensors lie in, and what the kernel wrote is copied back.
# Tensors that share memory share its copy, and offsets stay, so that what a kernel sees differs in nothing but the
# address.


@dataclass
class Mirror:
    """The memory of one launch's arguments, on the device."""

    device: torch.device
    copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def moved(self, argument: Any) -> Any:
        """Return an argument of a launch with its CPU tensors on the device."""
        if isinstance(argument, tuple) and hasattr(argument, "_fields"):  # a layout: a constant without tensors
            return argument
        if isinstance(argument, tuple | list):
            return type(argument)(map(self.moved, argument))
        if not isinstance(argument, Tensor) or argument.device.type != "cpu":
            return argument
        storage = argument.untyped_storage()
        if storage.data_ptr() not in self.copies:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.copies[storage.data_ptr()] = (whole, whole.to(self.device, copy=True))
        copied = self.copies[storage.data_ptr()][1].untyped_storage()
        view = torch.empty(0, dtype=argument.dtype, device=self.device)
        return view.set_(copied, argument.storage_offset(), argument.size(), argument.stride())

    def bring_back(self) -> None:
        """Copy everything back, once the kernel has run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for whole, copied in self.copies.values():
            whole.copy_(copied)


def launch_on(device: torch.device, launch: Any) -> Any:
    """Return what takes the place of `triton.JITFunction.run`."""

    def run(self: Any, *args: object, **kwargs: object) -> object:
        mirror = Mirror(device)
        answer = launch(self, *map(mirror.moved, args), **{key: mirror.moved(value) for key, value in kwargs.items()})
        mirror.bring_back()
        return answer

    return run


# Runners whose decode steps go through a GPU's kernels, in Triton's interpreter, and eager ones beside them.

INTERPRETED_ROWS = 128  # of a program: what one costs in the interpreter depends little on its rows


def let_programs_be_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter fast; where there is a GPU it is off, and tests/cuda has whole models on the device."""
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted where there is a GPU: tests/cuda runs them there")
    monkeypatch.setattr(dense, "ROWS", INTERPRETED_ROWS)
    monkeypatch.setattr(dense, "SHARING_ROWS", INTERPRETED_ROWS)
    monkeypatch.setattr(dense, "WARPS", 1)
    monkeypatch.setattr(few_tokens, "rows_of", lambda *_: INTERPRETED_ROWS)


@dataclass(frozen=True)
class Runners:
    """Two runners over the same weights, each with caches of its own that are NaN where nothing was written."""

    eager: ProgramRunner
    device: ProgramRunner


def runners_of(engine: Engine, batch: int) -> Runners:
    assert isinstance(engine.runner, ProgramRunner)
    own = engine.runner.builder

    def runner(is_device: bool) -> ProgramRunner:
        caches = poisoned(own.caches)
        kernels = DeviceBlocks.allocate(caches, own.device) if is_device else None
        sizes = (own.layer_groups, caches, own.context, own.device)
        builder = GraphBuilder(own.decoder, "eager", *sizes, decode_kernels=kernels)
        return ProgramRunner(builder, engine.runner.policy, batch, engine.runner.chunks)

    return Runners(runner(is_device=False), runner(is_device=True))


def kernels_of(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch, *, interprets: bool = True) -> list[str]:
    """Return the names of the kernels that `run` launches, in order: Triton's own, and torch's as "aten ...".

    An op of graphcore that the CPU computes otherwise, as the delta rule, is "graphcore ...".

    Args:
        interprets: False to run no kernel of Triton, whose outputs then keep what was in their memory.
    """
    names: list[str] = []
    launch = InterpretedFunction.run

    def recorded(self: Any, *args: object, **options: object) -> object:
        names.append(self.fn.__name__.lstrip("_"))
        return launch(self, *args, **options) if interprets else None

    class TorchOps(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
            if op.namespace == "aten" and not op.is_view and "empty" not in op.name():
                names.append(op.name().replace("::", " "))
            before = len(names)
            result = op(*args, **(kwargs or {}))
            if op.namespace == "graphcore" and len(names) == before:
                names.append(op.name().replace("::", " "))
            return result

    with monkeypatch.context() as patch, TorchOps():
        patch.setattr(InterpretedFunction, "run", recorded)
        run()
    return names


def poisoned(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Return new caches full of NaN, with the same tables; layers that share buffers share the new ones, too."""
    new: dict[int, torch.Tensor] = {}

    def full_of_nan(cache: LayerCache) -> LayerCache:
        tensors = (new.setdefault(one.data_ptr(), torch.full_like(one, float("nan"))) for one in cache.tensors)
        return KVCache(*tensors, cache.table) if isinstance(cache, KVCache) else RecurrentCache(*tensors)

    return [full_of_nan(cache) for cache in caches]
