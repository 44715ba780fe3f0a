"""70B under a fence of 14 GiB of device memory: that it runs, within its plan, at the rate of page-locked memory.

The goal is that of an earlier specification of layer streaming: a 70B model in 14 GB of device memory.
"""

import torch

from suite.ballast import FreeWatch, fenced
from suite.bench import Bench
from suite.log import Measurement
from suite.streaming import add_profile, streamed_row, time_streamed
from suite.timing import prompts_of

# The projections of a ternary checkpoint take int8 activations, as BitNet's do.
TERNARY = ("+model.random_config.quantization_config={quant_method: bitnet, linear_class: autobitlinear}",)


def llama_q4_k(bench: Bench) -> None:
    fenced_row(bench, "q4_k")


def llama_i2_s(bench: Bench) -> None:
    fenced_row(bench, "i2_s", *TERNARY)


def fenced_row(bench: Bench, format_name: str, *more: str) -> None:
    """Measure decode with what does not fit streamed, and the drop of free memory in a run of its own."""
    h2d = bench.ceiling("h2d")
    room = f"context_length={bench.sizes.prompt + 384}"
    with fenced(bench.device, bench.sizes.fence) as free:
        budget = () if bench.device.type == "cuda" else ("streaming.memory_budget=2MB",)
        settings = (*more, room, "streaming=auto", *budget)
        before = free_now(bench)
        with bench.engine("llama3_70b", f"random:{format_name}", *settings) as loaded:
            timed = time_streamed(bench, loaded)
            row = streamed_row(loaded, f"70B {format_name} in {bench.sizes.fence >> 20} MiB: decode", timed)
            row.of_ceiling("h2d", h2d, timed.wall_gb).aim("runs; 90 % of h2d", timed.wall_gb >= 0.9 * h2d)
            bench.log.add(row)
            with FreeWatch(bench.device) as watch:
                loaded.engine.generate(prompts_of(loaded.engine, 1, bench.sizes.prompt), 4, ignore_eos=True)
            drop, plan = before - watch.least, loaded.engine.plan
            memory = Measurement(f"70B {format_name}: drop of free device memory", "bytes", [float(drop)])
            memory.details |= {"plan_total_bytes": plan.total_nbytes, "free_before": free, "budget": plan.budget}
            is_kept = plan.budget is not None and drop <= plan.budget
            bench.log.add(memory.aim(f"within the budget of {plan.budget} bytes", is_kept))
            add_profile(bench, loaded, row)


def free_now(bench: Bench) -> int:
    """Return the bytes that are free on the device, what closed engines left included."""
    bench.give_memory_back()
    return torch.cuda.mem_get_info(bench.device)[0] if bench.device.type == "cuda" else 0
