"""70B under a fence of 14 GiB of device memory: that it runs, within its plan, at the rate of page-locked memory.

The goal is that of an earlier specification of layer streaming: a 70B model in 14 GB of device memory.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from graphcore.gpu_memory import device_fence
from suite.bench import Bench, Loaded
from suite.log import Measurement
from suite.streaming import add_profile, streamed_row, time_streamed

AUTO = ("streaming=auto",)
# The projections of a ternary checkpoint take int8 activations, as BitNet's do.
TERNARY = ("+model.random_config.quantization_config={quant_method: bitnet, linear_class: autobitlinear}",)


def llama_q4_k(bench: Bench) -> None:
    fenced_row(bench, "q4_k")


def llama_i2_s(bench: Bench) -> None:
    fenced_row(bench, "i2_s", *TERNARY)


def fenced_row(bench: Bench, format_name: str, *more: str) -> None:
    """Measure decode with what does not fit streamed, and the drop of free memory."""
    h2d = bench.ceiling("h2d")
    room = f"context_length={bench.sizes.prompt + 384}"
    budget = ("streaming.memory_budget=7.2MB",) if bench.is_dry else ()
    with fence(bench), bench.engine("llama3_70b", f"random:{format_name}", *more, room, *AUTO, *budget) as loaded:
        timed = time_streamed(bench, loaded)
        row = streamed_row(loaded, f"70B {format_name} in {bench.sizes.fence >> 20} MiB: decode", timed)
        row.of_ceiling("h2d", h2d, timed.wall_gb).aim("runs; 90 % of h2d", timed.wall_gb >= 0.9 * h2d)
        bench.log.add(row)
        bench.log.add(memory_row(loaded, f"70B {format_name}: drop of free device memory"))
        add_profile(bench, loaded, row)


def fence(bench: Bench) -> AbstractContextManager[object]:
    """Return what leaves the suite's 14 GiB of the device free; on the CPU, in a dry run, nothing is held.

    A device with less free keeps what it has, and a line says so.
    """
    if bench.is_dry:
        return nullcontext()
    free = torch.cuda.mem_get_info(bench.device)[0]
    if free < bench.sizes.fence:
        bench.log.write({"smaller": f"there is no fence: {free >> 20} MiB of the device are free"})
        return nullcontext()
    return device_fence(bench.device, bench.sizes.fence)


def memory_row(loaded: Loaded, name: str) -> Measurement:
    """Return the most that the device lost of its free memory since before the load, against the plan's budget."""
    plan, found = loaded.engine.plan, loaded.engine.loaded.free_memory
    if found is None:  # a dry run
        return Measurement(name, "bytes", [0.0])
    found.look()
    row = Measurement(name, "bytes", [float(found.drop)])
    row.details |= {"plan_total_bytes": plan.total_nbytes, "free_before_bytes": found.before}
    most = plan.total_nbytes if plan.budget is None else plan.budget
    return row.aim(f"within {most} bytes", found.drop <= most)
