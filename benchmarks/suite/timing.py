"""Timing an engine through its public calls: the device idle at both ends, prefill taken off decode."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.nn.linear import Linear
from graphcore.tasks.measuring.random_batch import RandomBatch
from graphcore.tasks.measuring.timed_runs import time_repeats
from graphcore.tasks.measuring.weight_reads import step_nbytes


@dataclass(frozen=True)
class DecodeTime:
    """Greedy decode of a batch.

    Attributes:
        step_seconds: of one step, in each repeat.
        first_seconds: from the call to the first token, median.
        nbytes: of weights that a step reads.
    """

    step_seconds: list[float]
    first_seconds: float
    batch: int
    nbytes: int

    @property
    def rates(self) -> list[float]:
        """Tokens/s of all sequences together."""
        return [self.batch / each for each in self.step_seconds]

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / statistics.median(self.step_seconds) / 1e9


def prompts_of(engine: Engine, batch: int, tokens: int, seed: int = 1) -> list[list[int]]:
    """Return random prompts, the same for the same sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(engine.config.vocab_size, (batch, tokens), generator=generator).tolist()


def time_decode(engine: Engine, batch: int, prompt: int, new: int, repeats: int) -> DecodeTime:
    """Return the time of decode steps: of generating new + 1 tokens less that of generating one."""
    rows, device = prompts_of(engine, batch, prompt), engine.runner.device

    def generate(tokens: int) -> Callable[[], object]:
        return lambda: engine.generate(rows, max_new_tokens=tokens, ignore_eos=True, temperature=0)

    generate(new + 1)()  # captures
    first = statistics.median(time_repeats(generate(1), repeats, device))
    wholes = time_repeats(generate(new + 1), repeats, device)
    steps = [max(whole - first, 1e-9) / new for whole in wholes]
    return DecodeTime(steps, first, batch, step_nbytes(own(engine).builder.decoder, batch))


def time_prefill(engine: Engine, tokens: int, repeats: int) -> list[float]:
    """Return the seconds of prefills of one prompt, in each repeat."""
    rows = prompts_of(engine, 1, tokens)

    def prefill() -> None:
        with torch.inference_mode():
            own(engine).extend(rows, [0])

    prefill()
    return time_repeats(prefill, repeats, engine.runner.device)


def decode_work(engine: Engine, batch: int, depth: int, steps: int) -> RandomBatch:
    """Return greedy steps from a depth at which the caches are as some earlier run left them."""
    return RandomBatch(engine, batch, depth, 1, steps, seed=1)


def own(engine: Engine) -> ProgramRunner:
    """Return the engine's runner: models here are all graphcore's own."""
    assert isinstance(engine.runner, ProgramRunner), "not one of graphcore's own models"
    return engine.runner


def prefill_flops(engine: Engine, tokens: int) -> float:
    """Return two operations for each weight of each block and token, the head once, and attention's products."""
    decoder = own(engine).builder.decoder
    blocks = sum(matrix_elements(module) for layer in decoder.layers for module in layer.modules())
    head = sum(matrix_elements(module) for module in decoder.head.modules())
    shapes = decoder.spec.attentions
    attention = sum(4 * (tokens * tokens / 2) * shape.heads * shape.head_dim for shape in shapes)
    return 2.0 * blocks * tokens + 2.0 * head + attention


def matrix_elements(module: torch.nn.Module) -> int:
    """Return rows times columns of a product; 0 for other modules."""
    return module.outputs * module.inputs if isinstance(module, Linear) else 0
