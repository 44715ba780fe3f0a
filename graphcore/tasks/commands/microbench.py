"""task=microbench: time each operation of a decode step alone, the whole step, and the difference between the two."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from omegaconf import MISSING

from graphcore.config.byte_sizes import rate_in_words
from graphcore.config.settings import Settings
from graphcore.config.validate import PROMPT_KEYS, at_least, refuse_unused_settings
from graphcore.engine.engine import Engine
from graphcore.errors import ConfigError
from graphcore.graph.cpu.native_decode import NativeStep
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.sampling_params import SamplingParams
from graphcore.streaming.scheduler import run_program
from graphcore.tasks.measuring.decode_operations import Clock, Operation, OperationName
from graphcore.tasks.measuring.native_operations import native_operations
from graphcore.tasks.measuring.torch_operations import TorchOperations
from graphcore.tasks.measuring.weight_reads import step_nbytes
from graphcore.tasks.report.run_record import bandwidth_of, compile_record, ran_record, share_of
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import describe, load_engine, own_runner

COLUMNS = ("operation", "shape", "format", "length", "count", "warm us", "in order us", "us/step", "GiB/s")
BY_LENGTH = "attend"  # the only kind whose cost depends on the context


@dataclass
class MicrobenchSettings:
    """The keys of conf/task/microbench.yaml."""

    name: str = MISSING
    lengths: list[int] = MISSING
    repeats: int = MISSING


@dataclass(frozen=True)
class LengthTimings:
    """Seconds of a decode step and of its operations at one length.

    Attributes:
        parts: seconds of each operation, in order.
        step: seconds of the whole step.
        warm: seconds of the operations that were timed warm, by name.
    """

    parts: Sequence[float]
    step: float
    warm: Mapping[OperationName, float]


def run(context: Context, task: MicrobenchSettings) -> Record:
    """Load the engine, time the operations and the whole step at each length, and report."""
    _check(context.settings, task)
    began = time.perf_counter()
    with load_engine(context) as engine, torch.inference_mode():
        load_seconds = time.perf_counter() - began
        context.console.note(describe(engine, load_seconds))
        compiled = engine.warm_up(params=SamplingParams())
        program = own_runner(engine, "microbench").program("decode", 1, is_greedy=True)
        lengths = sorted({min(length, engine.choices.context_length) for length in task.lengths})
        work = StepWork.of(engine, program, task.repeats)
        timings = {}
        for index, length in enumerate(lengths):
            context.console.progress(f"microbench at {length} tokens", None, index, len(lengths))
            timings[length] = work.measure(length)
        ran = ran_record(engine)  # records free memory before the measurements take some
        bandwidth = bandwidth_of(engine)
        record = {
            **ran,
            "load_seconds": load_seconds,
            "compile": compile_record(compiled),
            "bandwidth": bandwidth,
            "operations": operation_records(work.operations, timings, bandwidth),
            "steps": step_records(timings, step_nbytes(own_runner(engine, "microbench").builder.decoder, 1), bandwidth),
        }
    show(context, record, task)
    return record


def _check(settings: Settings, task: MicrobenchSettings) -> None:
    """Check the task's settings.

    Raises:
        ConfigError: a length or the repeats are out of range, or another setting has no effect.
    """
    refuse_unused_settings(settings, "microbench", (*PROMPT_KEYS, "graph.artefacts"))
    at_least(1, "task.", task, ("repeats",))
    if not task.lengths or min(task.lengths) < 1:
        raise ConfigError(f"task.lengths={task.lengths} must name at least one length, each at least 1")


@dataclass(frozen=True)
class StepWork:
    """A greedy decode step, whole and as its operations.

    Attributes:
        states: states that the whole step and the operations read their inputs from.
    """

    engine: Engine
    program: Program
    operations: Sequence[Operation]
    states: Sequence[StepState]
    clock: Clock

    @classmethod
    def of(cls, engine: Engine, program: Program, repeats: int) -> "StepWork":
        """Return the work of a program; its operations are native instructions, or torch's operations one by one."""
        runner, step = own_runner(engine, "microbench"), program.steps[0]
        device, builder = runner.device, runner.builder
        if isinstance(step, NativeStep):
            native = step.program
            runner.reserve(0, 0, 1)
            program.state.put_rows([[0]], [0])
            operations = native_operations(native, program.state.logits.data_ptr())
            clock = Clock(device, lambda: native.run(0, 0), repeats)  # the cost of waking the thread team
            return cls(engine, program, operations, [program.state], clock)
        plain = builder.token(1, is_greedy=True)
        runner.reserve(0, 0, 1)
        plain.state.put_rows([[0]], [0])
        run_program(plain, engine.runner.policy)
        compiles, cache_dir = builder.kind == "compiled", builder.cache_dir
        collector = TorchOperations(
            builder.decoder, plain.state, builder.caches, engine.choices.dtype, device, compiles, cache_dir
        )
        clock = Clock(device, lambda: None, repeats)
        return cls(engine, program, collector.collect(plain), [program.state, plain.state], clock)

    def measure(self, length: int) -> LengthTimings:
        """Return the timings with `length` tokens in the cache, including the step's own token."""

        runner = own_runner(self.engine, "microbench")
        runner.reserve(0, length - 1, length)

        def reset() -> None:
            for state in self.states:
                state.put_rows([[0]], [length - 1])

        step = self.clock.step_seconds(lambda: run_program(self.program, self.engine.runner.policy), reset)
        parts = self.clock.pass_seconds(self.operations, reset)
        warm = {}
        for operation in {operation.name: operation for operation in self.operations}.values():
            reset()
            warm[operation.name] = self.clock.warm_seconds(operation)
        return LengthTimings(parts, step, warm)


def operation_records(
    operations: Sequence[Operation], timings: Mapping[int, LengthTimings], bandwidth: Record
) -> list[Record]:
    """Return the record of each distinct operation: attention at each length, the others at the longest."""
    names = Counter(operation.name for operation in operations)
    nbytes = {operation.name: operation.weight_nbytes for operation in operations}
    records = []
    for name, count in names.items():
        for length in sorted(timings) if name.kind == BY_LENGTH else [max(timings)]:
            found = timings[length]
            pairs = zip(operations, found.parts, strict=True)
            total = sum(seconds for operation, seconds in pairs if operation.name == name)
            rate = nbytes[name] * count / total / 1e9 if total and nbytes[name] else None
            records.append(
                {
                    **name._asdict(),
                    "length": length if name.kind == BY_LENGTH else None,
                    "count": count,
                    "weight_bytes": nbytes[name],
                    "warm_microseconds": found.warm[name] * 1e6,
                    "in_order_microseconds": total / count * 1e6,
                    "step_microseconds": total * 1e6,
                    "weight_gb_per_second": rate,
                    "bandwidth_share": share_of(rate, bandwidth),
                }
            )
    return records


def step_records(timings: Mapping[int, LengthTimings], nbytes: int, bandwidth: Record) -> list[Record]:
    """Return the times of the whole step at each length, with the sum of its operations."""
    records = []
    for length, found in sorted(timings.items()):
        rate = nbytes / found.step / 1e9
        records.append(
            {
                "length": length,
                "microseconds": found.step * 1e6,
                "sum_microseconds": sum(found.parts) * 1e6,
                "difference_microseconds": (found.step - sum(found.parts)) * 1e6,
                "weight_bytes": nbytes,
                "weight_gb_per_second": rate,
                "bandwidth_share": share_of(rate, bandwidth),
            }
        )
    return records


def show(context: Context, record: Record, task: MicrobenchSettings) -> None:
    """Print a row for each operation, and the difference between the whole step and their sum."""
    rows = []
    for found in record["operations"]:
        rate = found["weight_gb_per_second"]
        times = (found[f"{name}_microseconds"] for name in ("warm", "in_order", "step"))
        words = (found["kind"], found["shape"], found["format"], str(found["length"] or ""), str(found["count"]))
        rows.append(
            [*words, *(f"{value:.1f}" for value in times), "" if rate is None else f"{rate * 1e9 / (1 << 30):.1f}"]
        )
    context.console.table(f"one decode step, medians of {task.repeats}", COLUMNS, rows)
    for step in record["steps"]:
        share = step["bandwidth_share"]
        beside = "" if share is None or share > 1 else f", {share:.0%} of what memory gives"
        speed = rate_in_words(step["weight_gb_per_second"] * 1e9)
        context.console.line(
            f"{step['length']} tokens: step {step['microseconds']:.0f} us, parts {step['sum_microseconds']:.0f} us, "
            f"difference {step['difference_microseconds']:+.0f} us; {speed} "
            f"of weights{beside}"
        )


MICROBENCH = Task("microbench", MicrobenchSettings, run)
