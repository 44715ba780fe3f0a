"""How fast this machine moves and reads weights, measured in a second or two, for predictions.

A probe moves at most 256 MB of the weights that will stream, all the way into memory laid out as a slot is, and reads
as much memory as fast as products can.
"""

import torch

from graphcore.engine.assembly import Assembly
from graphcore.engine.group_jobs import THREADS
from graphcore.engine.planning import Tier
from graphcore.engine.weight_stream import movement_of, open_files
from graphcore.kernels.bandwidth import measure_read_bandwidth
from graphcore.streaming.link import PROBE_NBYTES, measure_jobs, scratch_copies, scratch_jobs
from graphcore.weights.groups import split_layers
from graphcore.weights.plan import Plan
from graphcore.weights.prediction import Rates

# Of the rate at which memory is read by doing nothing else, what products reach in whole decode steps of dense and
# packed models (docs/numbers.md: 66 to 90 %).
PRODUCT_SHARE = 0.8


def measure_rates(parts: Assembly, plan: Plan, tier: Tier, layer_group_size: int) -> Rates:
    """Return the rates that a plan's decode steps depend on.

    Raises:
        CheckpointError: a file changed, or cannot be read.
    """
    device, library = parts.choices.device, parts.choices.packing.library
    read = measure_read_bandwidth(device, library, PROBE_NBYTES, repeats=3).best
    link = _link(parts, plan, tier, layer_group_size) if plan.streamed else float("inf")
    return Rates(link, PRODUCT_SHARE * read)


def _link(parts: Assembly, plan: Plan, tier: Tier, layer_group_size: int) -> float:
    """Return the bytes/s at which groups arrive in their slots when nothing else runs."""
    if tier.kind == "host":
        copies = scratch_copies(PROBE_NBYTES // 2) * 2
        return measure_jobs(copies, {}, THREADS).bytes_per_second
    layers = split_layers(len(parts.decoder.layers), layer_group_size)
    movement = movement_of(parts.decoder, plan, layers)
    files = open_files(parts.loader, sorted(movement.moved), tier.is_direct)
    try:
        with torch.inference_mode():
            jobs = scratch_jobs(parts.loader, movement.groups, is_cached=not tier.is_direct)
            return measure_jobs(jobs, files, THREADS).bytes_per_second
    finally:
        for source in files.values():
            source.close()
