"""What a part is given: where it writes, how large it is, engines, and ceilings measured beside its own numbers."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.graph.compile import CompileReport
from graphcore.memory_limit import free_ram_nbytes
from suite.best_rates import copy_rates, gemm_rates, transfer_rates
from suite.fitting import GIB, Room, layers_that_fit, shape_of
from suite.log import Log, Measurement
from suite.shapes import DRY, TRUE, Sizes, model_overrides


@dataclass
class Loaded:
    """An engine that is warm.

    Attributes:
        settings: overrides that it was loaded with.
        load_seconds, warm_seconds: of loading, and of compiling and capturing.
    """

    engine: Engine
    settings: Sequence[str]
    load_seconds: float
    warm_seconds: float
    compiled: CompileReport

    @property
    def device(self) -> torch.device:
        return self.engine.runner.device

    def ran(self) -> dict[str, object]:
        """Return what really ran, for the report."""
        plan, choices = self.engine.plan, self.engine.choices
        return {
            **self.engine.stats,
            "context": choices.context_length,
            "load_seconds": self.load_seconds,
            "warm_seconds": self.warm_seconds,
            "compile_cache_misses": self.compiled.cache_misses,
            "plan_total_bytes": plan.total_nbytes,
            "streamed_groups": len(plan.groups.streamed),
            "groups": plan.groups.num_layer_groups,
            "notes": list(self.engine.notes),
        }


@dataclass
class Bench:
    """One part's means.

    Attributes:
        folder: of the run; for files besides the log.
        cache_dir: graphcore's own; None is the user's.
        ceilings: GB/s and TFLOP/s that this process has measured so far.
    """

    folder: Path
    log: Log
    is_dry: bool
    cache_dir: Path | None = None
    ceilings: dict[str, float] = field(default_factory=dict)
    _layers: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.is_dry else torch.device("cuda", 0)

    @property
    def sizes(self) -> Sizes:
        return DRY if self.is_dry else TRUE

    def settings(self, model: str, checkpoint: str, *overrides: str) -> list[str]:
        """Return the overrides of an engine; a dry run is eager, on the CPU, of a tiny shape."""
        own = [] if self.cache_dir is None else [f"cache_dir={self.cache_dir}"]
        where = ["device=cpu", "graph=eager", "threads=1"] if self.is_dry else ["device=cuda:0"]
        fewer = self._layers.get((model, checkpoint), ())
        return [*model_overrides(model, checkpoint, self.is_dry), *where, *own, *fewer, *overrides]

    def fit(
        self,
        model: str,
        checkpoint: str,
        ways: Sequence[str],
        *overrides: str,
        tokens: int = 0,
        copies: float = 1.0,
        is_all_dense: bool = False,
    ) -> None:
        """Choose how many layers of a model this machine has room for, in all of the ways; the log says if not all.

        Engines of the same model and checkpoint have that many from now on.

        Args:
            ways: streaming's policies.  tokens: that keys and values are kept for; 0 is the default of the suite.
            copies: how often the weights are on the device at once, as `peers` has them.
            is_all_dense: they are all in bf16 then.
        """
        self._layers[model, checkpoint] = ()
        if self.is_dry:
            return
        settings = self.settings(model, checkpoint, *overrides)
        shape = shape_of(compose_settings(settings).model.random_config, checkpoint.partition(":")[2], is_all_dense)
        room = Room(torch.cuda.mem_get_info(self.device)[0], free_ram_nbytes())
        layers = layers_that_fit(shape, room, ways, tokens or self.sizes.long_prompt, copies)
        if layers < shape.layers:
            self._layers[model, checkpoint] = (f"model.num_hidden_layers={layers}",)
            words = f"{model} {checkpoint} has {layers} of {shape.layers} layers"
            free = f"{room.device / GIB:.1f} GiB of the device and {room.ram / GIB:.1f} GiB of RAM are free"
            self.log.write({"smaller": f"{words}: {free}"})

    @contextmanager
    def engine(self, model: str, checkpoint: str, *overrides: str, batch: int = 1) -> Iterator[Loaded]:
        """Load and warm up an engine; its memory is given back at the end."""
        if (model, checkpoint) not in self._layers:
            ways = [word.partition("=")[2] for word in overrides if word.startswith("streaming=")]
            self.fit(model, checkpoint, ways or ("off",), *(word for word in overrides if "random_config" in word))
        settings = self.settings(model, checkpoint, *overrides)
        began = time.perf_counter()
        engine = Engine.from_settings(compose_settings([*settings, "sampling=greedy"]))
        loaded = time.perf_counter()
        try:
            compiled = engine.warm_up(batch)
            yield Loaded(engine, settings, loaded - began, time.perf_counter() - loaded, compiled)
        finally:
            engine.close()
            del engine
            self.give_memory_back()

    def give_memory_back(self) -> None:
        """Return to the device what closed engines had; a dry run has little, and collecting takes a second."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def ceiling(self, name: str) -> float:
        """Return "copy" or "h2d" in GB/s, or "gemm" in TFLOP/s, measured once in this process; the best counts."""
        if name not in self.ceilings:
            nbytes = self.sizes.ceiling_nbytes // 2  # small enough to stand beside a fenced model
            measured = {
                "copy": lambda: copy_rates(self.device, nbytes),
                "h2d": lambda: transfer_rates(self.device, nbytes // 2),
                "gemm": lambda: gemm_rates(self.device, self.sizes.gemm),
            }[name]()
            self.give_memory_back()
            self.ceilings[name] = max(measured)
            unit = "TFLOP/s" if name == "gemm" else "GB/s"
            self.log.add(Measurement(f"ceiling {name} ({self.log.part})", unit, measured))
        return self.ceilings[name]
