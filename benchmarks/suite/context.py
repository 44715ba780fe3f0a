"""One sequence in a context of 128K: the memory that it takes, decode at depth, and what attention costs by depth."""

import statistics
import time

import torch

from graphcore.tasks.measuring.timed_runs import synchronize, time_repeats
from suite.bench import Bench, Loaded
from suite.fenced import memory_row
from suite.log import Measurement
from suite.profiling import profile_steps
from suite.timing import decode_work, own, prompts_of

REPORTED_DEPTH = 65536
STEPS = 32


def run(bench: Bench) -> None:
    measure(bench, "bf16")


def coded(bench: Bench) -> None:
    measure(bench, "q8_0")


def measure(bench: Bench, kv: str) -> None:
    """Measure a context whose keys and values are stored as `kv`."""
    sizes, name = bench.sizes, "Llama-3.1-8B bf16" if kv == "bf16" else f"Llama-3.1-8B bf16, kv {kv}"
    settings = (f"context_length={sizes.context}", f"prefill_chunk={sizes.long_prompt}", f"kv_dtype={kv}")
    bench.fit("llama3_8b", "random:bf16", ("off",), tokens=sizes.context)
    with bench.engine("llama3_8b", "random:bf16", *settings) as loaded:
        fill(bench, loaded, name)
        rows = [depth_row(bench, loaded, name, depth) for depth in sizes.depths]
        bench.log.add(memory_row(loaded, f"{name}, 128K: drop of free device memory"))
    base = 1 / rows[0].median
    for row, depth in list(zip(rows, sizes.depths, strict=True))[1:]:
        cost = (1 / row.median - base) * 1e6
        bench.log.add(Measurement(f"{name}: attention of one token at depth {depth}, all layers", "us", [cost]))


def fill(bench: Bench, loaded: Loaded, name: str) -> None:
    """Run a prompt as long as the deepest measurement, once, timed."""
    engine, tokens = loaded.engine, bench.sizes.depths[-1]
    rows = prompts_of(engine, 1, tokens)
    began = time.perf_counter()
    with torch.inference_mode():
        own(engine).extend(rows, [0])
    synchronize(bench.device)
    rate = tokens / (time.perf_counter() - began)
    bench.log.add(Measurement(f"{name} prefill of {tokens} tokens, once", "tokens/s", [rate]))


def depth_row(bench: Bench, loaded: Loaded, name: str, depth: int) -> Measurement:
    """Measure decode steps from a depth."""
    copy = bench.ceiling("copy")
    work = decode_work(loaded.engine, 1, depth, min(STEPS, bench.sizes.new))
    work.decode()
    seconds = time_repeats(work.decode, bench.sizes.repeats, bench.device)
    step = statistics.median(seconds) / work.new_tokens
    kv_nbytes = loaded.engine.plan.kv_nbytes * depth // bench.sizes.context
    rate = (work.weight_nbytes() + kv_nbytes) / step / 1e9
    rates = [work.new_tokens / each for each in seconds]
    row = Measurement(f"{name} decode at depth {depth}", "tokens/s", rates, rate, settings=loaded.settings)
    row.of_ceiling("copy", copy, rate).note = "GB/s of weights and of live keys and values"
    if depth in (0, REPORTED_DEPTH):
        row.profile = profile_steps(work.decode, work.new_tokens, bench.device, own(loaded.engine)).line()
    if depth == REPORTED_DEPTH:
        row.aim("reported", met=True)
    bench.log.add(row)
    return row
