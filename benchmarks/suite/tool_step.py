"""One captured decode step for a tool of NVIDIA's: tiny, or one layer of the true shape.

    python -m suite.tool_step DEVICE tiny|true MODEL CHECKPOINT [CACHE]

What comes before the step is not profiled: a tool that is told to (--profile-from-start off) begins with it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.tasks.measuring.timed_runs import synchronize
from suite.shapes import model_overrides
from suite.timing import decode_work


def main() -> None:
    device, size, model, checkpoint, *cache = sys.argv[1:]
    own = [f"cache_dir={folder}" for folder in cache if folder]
    graph = "captured" if device.startswith("cuda") else "eager"
    layers = ["model.num_hidden_layers=1"] if size == "true" else []
    where = [f"device={device}", f"graph={graph}", "context_length=128", *own, *layers]
    settings = compose_settings([*model_overrides(model, checkpoint, size == "tiny"), *where])
    with Engine.from_settings(settings) as engine:
        work = decode_work(engine, 1, 16, 1)
        work.fill()
        work.decode()  # captures
        synchronize(engine.runner.device)
        with profiled(engine.runner.device):
            work.decode()
    print("one step ran")


@contextmanager
def profiled(device: torch.device) -> Iterator[None]:
    """Let a tool look at what runs inside the block."""
    if device.type == "cuda":
        torch.cuda.profiler.start()
    yield
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
