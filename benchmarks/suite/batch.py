"""Whether copying ever stands still where a pass has work to do meanwhile: 32 sequences, and prefill of 2048 tokens.

Copying all of an 8B takes far longer than either computes, so most copying has nothing to hide behind. What a pass
can do is to leave no pause on the link: the share of its time in which something is copied.
"""

import time

import torch

from graphcore.streaming.report import StreamingReport
from graphcore.tasks.measuring.timed_runs import time_repeats
from graphcore.tasks.report.stream_watch import Interval, StreamWatch
from suite.bench import Bench, Loaded
from suite.log import Measurement
from suite.streaming import add_profile, streamed_row, time_streamed
from suite.timing import own, prompts_of


def run(bench: Bench) -> None:
    sizes = bench.sizes
    _, wide = sizes.batches
    chunk = f"prefill_chunk={sizes.long_prompt}"
    room = f"context_length={sizes.long_prompt + 64}"
    with bench.engine("llama3_8b", "random:bf16", "streaming=on", room, chunk) as loaded:
        prefill_row(bench, loaded)
    room = f"context_length={sizes.prompt + 64}"
    with bench.engine("llama3_8b", "random:bf16", "streaming=on", room, f"batch_size={wide}", batch=wide) as loaded:
        timed = time_streamed(bench, loaded, wide)
        row = streamed_row(loaded, f"Llama-3.1-8B bf16, streaming=on: decode, batch {wide}", timed)
        bench.log.add(with_busy_share(row, timed.report))
        add_profile(bench, loaded, row, wide)


def prefill_row(bench: Bench, loaded: Loaded) -> None:
    """Measure the prefill of one long prompt in one chunk, and how much of its copying is hidden."""
    engine, tokens = loaded.engine, bench.sizes.long_prompt
    rows = prompts_of(engine, 1, tokens)

    def prefill() -> None:
        with torch.inference_mode():
            own(engine).extend(rows, [0])

    watch = StreamWatch.begin(engine)
    prefill()
    began = time.perf_counter()
    seconds = time_repeats(prefill, bench.sizes.repeats, bench.device)
    report = watch.report(Interval(began, time.perf_counter(), bench.sizes.repeats), None, watch.device())
    name = f"Llama-3.1-8B bf16, streaming=on: prefill of {tokens}"
    row = Measurement(name, "tokens/s", [tokens / each for each in seconds], settings=loaded.settings)
    row.details["ran"] = loaded.ran()
    bench.log.add(with_busy_share(row, report))


def with_busy_share(row: Measurement, report: StreamingReport | None) -> Measurement:
    """Add the share of time in which the link was busy, and its target; a plan that streams nothing does not reach it.

    The share of copying that was hidden is a note: it is bounded by how long a pass computes.
    """
    busy = report.copy_seconds / report.seconds if report else 0.0
    hidden = (report.overlap or 0.0) if report else 0.0
    row.note = f"the link is busy {busy:.1%} of the time; {hidden:.0%} of copying hidden"
    row.details |= {"link_busy": busy, "overlap": hidden}
    return row.aim("link busy 92 % of the time", busy >= 0.92)
