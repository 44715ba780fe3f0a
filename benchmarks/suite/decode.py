"""Resident decode and prefill of one sequence, on random weights of the true shapes."""

from suite.bench import Bench, Loaded
from suite.log import Measurement
from suite.profiling import profile_steps
from suite.timing import decode_work, own, prefill_flops, time_decode, time_prefill

PROFILED_STEPS = 8


def llama_bf16(bench: Bench) -> None:
    sizes = bench.sizes
    small, _ = sizes.batches
    room = f"context_length={sizes.long_prompt + sizes.new}"
    chunk = f"prefill_chunk={sizes.long_prompt}"
    with bench.engine("llama3_8b", "random:bf16", room, chunk) as loaded:
        decode_row(bench, loaded, "Llama-3.1-8B bf16 decode", 0.85)
        prefill_row(bench, loaded, "Llama-3.1-8B bf16 prefill", 0.60)
    # All steps of an engine run its kernels for its batch_size, so that a request has the same bits alone.
    with bench.engine("llama3_8b", "random:bf16", room, chunk, f"batch_size={small}", batch=small) as loaded:
        decode_row(bench, loaded, f"Llama-3.1-8B bf16 decode, batch {small}", None, small)


def llama_q4_k(bench: Bench) -> None:
    packed_llama(bench, "q4_k", 0.70)


def llama_q8_0(bench: Bench) -> None:
    packed_llama(bench, "q8_0", 0.80)


def packed_llama(bench: Bench, format_name: str, target: float) -> None:
    sizes = bench.sizes
    room = f"context_length={sizes.long_prompt + sizes.new}"
    chunk = f"prefill_chunk={sizes.long_prompt}"
    with bench.engine("llama3_8b", f"random:{format_name}", room, chunk) as loaded:
        decode_row(bench, loaded, f"Llama-3.1-8B {format_name} decode", target)
        prefill_row(bench, loaded, f"Llama-3.1-8B {format_name} prefill", None)


def gpt_oss(bench: Bench) -> None:
    with bench.engine("gpt_oss", "random:bf16", room_of(bench)) as loaded:
        decode_row(bench, loaded, "gpt-oss-20b mxfp4 decode", 0.60)


def bitnet(bench: Bench) -> None:
    with bench.engine("bitnet", "random:bf16", room_of(bench)) as loaded:
        row = decode_row(bench, loaded, "BitNet 2B-4T i2_s decode", None)
        is_met = row.median >= 500 or (row.share or 0) >= 0.5
        bench.log.add(row.aim("500 tokens/s or 50 % of copy", is_met))


def graphs(bench: Bench) -> None:
    """What captured steps consist of, and how prompts run, each against what it is chosen instead of."""
    sizes = bench.sizes
    room = f"context_length={sizes.long_prompt + sizes.new}"
    for format_name in ("bf16", "q4_k"):
        for blocks in ("kernels", "compiled"):
            with bench.engine("llama3_8b", f"random:{format_name}", room, f"graph.blocks={blocks}") as loaded:
                decode_row(bench, loaded, f"Llama-3.1-8B {format_name} decode, graph.blocks={blocks}", None)
        for prefill in ("compiled", "captured"):
            with bench.engine("llama3_8b", f"random:{format_name}", room, f"graph.prefill={prefill}") as loaded:
                prefill_row(bench, loaded, f"Llama-3.1-8B {format_name} prefill, graph.prefill={prefill}", None)


def room_of(bench: Bench) -> str:
    """Return the context that a decode measurement needs."""
    return f"context_length={bench.sizes.prompt + bench.sizes.new + 8}"


def decode_row(bench: Bench, loaded: Loaded, name: str, target: float | None, batch: int = 1) -> Measurement:
    """Measure decode, write it down, then profile it and write it down again."""
    sizes, engine = bench.sizes, loaded.engine
    copy = bench.ceiling("copy")
    timed = time_decode(engine, batch, sizes.prompt, sizes.new, sizes.repeats)
    row = Measurement(
        f"{name}, {sizes.prompt} + {sizes.new} tokens",
        "tokens/s",
        timed.rates,
        gb_per_second=timed.gb_per_second,
        settings=loaded.settings,
        details={"bytes_per_step": timed.nbytes, "first_token_seconds": timed.first_seconds, "ran": loaded.ran()},
    ).of_ceiling("copy", copy, timed.gb_per_second)
    if target is not None:
        row.aim(f"{target:.0%} of copy", (row.share or 0) >= target)
    bench.log.add(row)
    steps = decode_work(engine, batch, sizes.prompt, min(PROFILED_STEPS, sizes.new))
    found = profile_steps(steps.decode, steps.new_tokens, bench.device, own(engine), batch)
    row.profile = found.line()
    row.details["profile"] = found.record()
    bench.log.add(row)
    return row


def prefill_row(bench: Bench, loaded: Loaded, name: str, target: float | None) -> Measurement:
    """Measure the prefill of one long prompt against the rate of a large matrix product."""
    tokens, engine = bench.sizes.long_prompt, loaded.engine
    gemm = bench.ceiling("gemm")
    seconds = time_prefill(engine, tokens, bench.sizes.repeats)
    rates = [tokens / each for each in seconds]
    row = Measurement(f"{name}, {tokens} tokens", "tokens/s", rates, settings=loaded.settings)
    reached = prefill_flops(engine, tokens) / tokens * row.median / 1e12
    row.of_ceiling("gemm", gemm, reached).details |= {"tflops": reached, "ran": loaded.ran()}
    if target is not None:
        row.aim(f"{target:.0%} of gemm", (row.share or 0) >= target)
    bench.log.add(row)
    found = profile_steps(lambda: time_prefill(engine, tokens, 1), 2, bench.device)
    row.profile = found.line()
    row.details["profile"] = found.record()
    bench.log.add(row)
    return row
