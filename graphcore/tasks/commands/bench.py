"""task=bench: time prefill and decode separately, at a given depth of the KV cache; print a table and write JSON."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from omegaconf import MISSING

from graphcore.config.byte_sizes import in_words, rate_in_words
from graphcore.config.settings import Settings
from graphcore.config.validate import PROMPT_KEYS, at_least, refuse_unused_settings
from graphcore.device import resolve_device
from graphcore.engine.engine import Engine
from graphcore.engine.loading.runtime_config import DEFAULT_CONTEXT
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.speculation.speculation_record import speculation_record
from graphcore.errors import ConfigError
from graphcore.graph.compile import CompileReport
from graphcore.sampling_params import SamplingParams
from graphcore.tasks.measuring.process_memory import Growth, PeakMemory, compiler_nbytes, resident_now
from graphcore.tasks.measuring.random_batch import RandomBatch
from graphcore.tasks.measuring.timed_runs import Spread, count_kernels, time_repeats
from graphcore.tasks.report.run_record import bandwidth_of, compile_record, ran_record, share_of
from graphcore.tasks.report.startup import seconds_since_start
from graphcore.tasks.report.stream_watch import Interval, StreamWatch, show_streaming, streaming_of, streaming_results
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import describe, describe_compile, load_engine

COLUMNS = ("", "median", "min", "q1", "q3", "max")


@dataclass
class BenchSettings:
    """The keys of conf/task/bench.yaml."""

    name: str = MISSING
    prompt_tokens: int = MISSING
    new_tokens: int = MISSING
    depth: int = MISSING
    repeats: int = MISSING
    batch: int = MISSING

    @property
    def context(self) -> int:
        """Tokens of KV cache that each sequence needs."""
        return self.depth + max(self.prompt_tokens, self.new_tokens)


def run(context: Context, task: BenchSettings) -> Record:
    """Load the engine, warm it up, time the repeats, and report."""
    settings = bench_settings(context.settings, task)
    peak = PeakMemory(resolve_device(settings.device))
    before = resident_now()
    began = time.perf_counter()
    with load_engine(replace(context, settings=settings)) as engine:
        load_seconds = time.perf_counter() - began
        check_room(engine, task)
        context.console.note(describe(engine, load_seconds))
        loaded = resident_now()
        compiled = engine.warm_up(task.batch, SamplingParams())
        growth = Growth(before, loaded, resident_now())
        work = random_batch(engine, task)
        watch = StreamWatch.begin(engine)
        work.first_prefill()
        first_token_at = seconds_since_start()
        timed, intervals = measure(context, engine, work, task.repeats)
        peak_nbytes, device = peak.nbytes(), watch.device()
        streaming = streaming_of(watch, intervals, device)
        ran = ran_record(engine)  # records free memory before the measurements take some
        bandwidth = bandwidth_of(engine)
        work.fill()
        timed["decode"]["bandwidth_share"] = share_of(timed["decode"]["weight_gb_per_second"], bandwidth)
        record = {
            **ran,
            "load_seconds": load_seconds,
            "compile": compile_record(compiled),
            "process_to_first_token_seconds": first_token_at,
            **timed,
            "first_token_seconds": timed["prefill"]["median_seconds"],
            "graph": {
                **ran["graph"],
                "kernels_per_token": step_kernels(work, engine.runner.device),
                "instructions_per_token": step_instructions(engine.runner, task.batch),
            },
            "memory": {**ran["memory"], **resident_record(growth, ran["graph"]["prefill"], peak_nbytes)},
            "bandwidth": bandwidth,
            "streaming": streaming_results(engine, streaming),
            "speculation": speculation_record(engine),
        }
        show(context, task, record, compiled)
        show_streaming(context, engine, streaming, intervals)
    return record


def bench_settings(settings: Settings, task: BenchSettings) -> Settings:
    """Return the settings with room for the task's batch and depth.

    Raises:
        ConfigError: a size is out of range, or another setting contradicts it or has no effect.
    """
    at_least(1, "task.", task, ("prompt_tokens", "new_tokens", "repeats", "batch"))
    at_least(0, "task.", task, ("depth",))
    refuse_unused_settings(settings, "bench", PROMPT_KEYS)
    if settings.batching.max_sequences not in (1, task.batch):
        raise ConfigError(
            f"batch_size={settings.batching.max_sequences} and task.batch={task.batch} contradict each other; set "
            "task.batch alone"
        )
    context = settings.context_length
    if context is None and task.context > DEFAULT_CONTEXT:
        context = task.context
    batching = replace(settings.batching, max_sequences=task.batch)
    return replace(settings, batching=batching, context_length=context)


def check_room(engine: Engine, task: BenchSettings) -> None:
    """Check that the task's batch and depth fit into the loaded engine.

    Raises:
        ConfigError: the batch or the depth is too large.
    """
    sizes = engine.runner.sizes
    sizes.check_context(task.context)
    if task.batch > sizes.batch_size:
        raise ConfigError(
            f"task.batch={task.batch}, and prompts of {engine.config.model_type} run one by one; use task.batch=1"
        )


def random_batch(engine: Engine, task: BenchSettings) -> RandomBatch:
    """Return the batch to time; the settings' seed draws its tokens."""
    return RandomBatch(engine, task.batch, task.depth, task.prompt_tokens, task.new_tokens, engine.settings.seed)


def step_kernels(work: RandomBatch, device: torch.device) -> int:
    """Return the number of kernels that one decode step launches, without those for starting or ending requests."""
    one, two = (count_kernels(partial(work.decode_some, steps), device) for steps in (1, 2))
    return two - one


def step_instructions(runner: ModelRunner, batch: int) -> int | None:
    """Return the number of native instructions that a decode step of `batch` sequences runs; None if it runs none."""
    return runner.programs.instructions_of_step(batch) if isinstance(runner, ProgramRunner) else None


def measure(context: Context, engine: Engine, work: RandomBatch, repeats: int) -> tuple[Record, dict[str, Interval]]:
    """Return the records of prefill and decode, each timed after one untimed run, and the interval of each."""
    device = engine.runner.device
    seconds: dict[str, list[float]] = {}
    intervals: dict[str, Interval] = {}
    phases = (("prefill", work.prefill, work.num_prefill_passes()), ("decode", work.decode, work.new_tokens))
    for phase, run_once, num_passes in phases:
        context.console.progress(f"bench {phase}", None, 0, 0)
        work.fill()
        run_once()
        drafting = engine.batching.speculation if phase == "decode" else None
        began, before = time.perf_counter(), 0 if drafting is None else drafting.steps
        seconds[phase] = time_repeats(run_once, repeats, device, work.fill)
        ended, all_passes = time.perf_counter(), num_passes * repeats
        if drafting is not None:
            all_passes = drafting.steps - before
        intervals[phase] = Interval(began, ended, all_passes + work.num_fill_passes() * repeats)
        steps = all_passes / repeats
    nbytes = work.weight_nbytes()
    step_seconds = Spread.of(seconds["decode"]).median / steps
    record = {
        "prefill": phase_record(seconds["prefill"], work.batch * work.prompt_tokens),
        "decode": {
            **phase_record(seconds["decode"], work.batch * work.new_tokens),
            "weight_bytes_per_step": nbytes,
            "weight_gb_per_second": nbytes / step_seconds / 1e9,
        },
    }
    return record, intervals


def phase_record(seconds: Sequence[float], tokens: int) -> Record:
    """Return the record of one phase's repeats; `tokens` counts those of all sequences."""
    speeds = Spread.of([tokens / each for each in seconds])
    return {
        "tokens_per_second": speeds.median,
        "tokens_per_second_spread": asdict(speeds),
        "median_seconds": Spread.of(seconds).median,
        "seconds": list(seconds),
        "tokens": tokens,
    }


def resident_record(growth: Growth, prefill: str, peak_nbytes: int) -> Record:
    """Return the process's resident memory, the compiler's part of it, and the device's peak, in bytes."""
    return {
        "before_load_bytes": growth.before,
        "resident_bytes": growth.warm,
        "compiler_bytes": compiler_nbytes(growth, prefill),
        "peak_device_bytes": peak_nbytes,
    }


def show(context: Context, task: BenchSettings, record: Record, compiled: CompileReport) -> None:
    """Print the table and the figures that do not fit in it."""
    rows = []
    for phase in ("prefill", "decode"):
        spread = record[phase]["tokens_per_second_spread"]
        rows.append([f"{phase} tokens/s", *(f"{spread[name]:.1f}" for name in COLUMNS[1:])])
    sizes = f"prompt {task.prompt_tokens}, new {task.new_tokens}, depth {task.depth}, batch {task.batch}"
    context.console.table(f"{sizes}, {task.repeats} repeats", COLUMNS, rows)
    decode, memory, graph = record["decode"], record["memory"], record["graph"]
    share, reads = decode["bandwidth_share"], rate_in_words(decode["weight_gb_per_second"] * 1e9)
    whole = record["bandwidth"]["gb_per_second"]
    is_said = share is not None and share <= 1
    beside = f", {share:.0%} of the {rate_in_words(whole * 1e9)} that memory gives" if is_said else ""
    compiler = memory["compiler_bytes"]
    of_which = "" if compiler is None else f", of which the compiler {in_words(compiler)}"
    above = " above what it was before loading" if record["device"] == "cpu" else ""  # on the CPU the peak is a growth
    instructions = graph["instructions_per_token"]
    size = f"{graph['kernels_per_token']} kernels" if instructions is None else f"{instructions} native instructions"
    for line in (
        f"decode reads {reads} of weights{beside}; {size}/step",
        f"{graph['kind']}: {describe_compile(compiled)}; loaded in {record['load_seconds']:.2f} s",
        f"first token {record['first_token_seconds']:.3f} s after the call, the very first "
        f"{record['process_to_first_token_seconds']:.1f} s after the process began",
        f"memory: weights {in_words(memory['weight_bytes'])} ({in_words(memory['file_bytes'])} in the file), "
        f"resident {in_words(memory['resident_bytes'])}{of_which}; peak {in_words(memory['peak_device_bytes'])}{above}",
    ):
        context.console.line(line)


BENCH = Task("bench", BenchSettings, run)
