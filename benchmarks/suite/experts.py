"""Experts in page-locked host memory, which a captured step brings to slots or reads there, against copied ones.

Half of the experts' bytes have no room on the device in either way. Random weights route nearly uniformly, which is the
worst case for slots and for a cache of experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from suite.bench import Bench
from suite.decode import room_of
from suite.log import Measurement
from suite.streaming import add_profile, budget_of, streamed_row, time_streamed


def run(bench: Bench) -> None:
    """Measure both ways under the same budget, and everything streamed."""
    bench.fit("gpt_oss", "random:bf16", ("off", "on"))
    with bench.engine("gpt_oss", "random:bf16", room_of(bench)) as loaded:
        total, experts = loaded.engine.plan.total_nbytes, loaded.engine.plan.resident_expert_nbytes
        whole = experts or loaded.engine.plan.weight_nbytes // 2
    budget = budget_of(total - whole // 2 + bench.sizes.ceiling_nbytes // 4)
    rates = {}
    for way in ("mapped", "copied"):
        with mapping_allowed(way == "mapped"):
            rates[way] = expert_row(bench, f"half the experts {way}", ("streaming=auto", budget))
    expert_row(bench, "all that may stream, experts mapped", ("streaming=on",))
    ratio = Measurement("gpt-oss-20b: mapped over copied experts", "x", [rates["mapped"] / rates["copied"]])
    bench.log.add(ratio.aim("mapped wins", ratio.median > 1))


@contextmanager
def mapping_allowed(is_allowed: bool) -> Iterator[None]:
    """Let the planner map experts, or not: people have no such choice, the suite compares both."""
    own = PreparedDecoder.has_device_readable_experts
    if not is_allowed:
        PreparedDecoder.has_device_readable_experts = lambda self, settings, tier: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreparedDecoder.has_device_readable_experts = own  # type: ignore[method-assign]


def expert_row(bench: Bench, name: str, settings: tuple[str, ...]) -> float:
    """Measure one way; return its tokens/s."""
    h2d = bench.ceiling("h2d")
    with bench.engine("gpt_oss", "random:bf16", room_of(bench), *settings) as loaded:
        timed = time_streamed(bench, loaded)
        row = streamed_row(loaded, f"gpt-oss-20b mxfp4, {name}: decode", timed)
        if timed.wall_gb:
            row.of_ceiling("h2d", h2d, timed.wall_gb)
        plan, rate = loaded.engine.plan.experts, loaded.engine.loaded.weight_stream.expert_hit_rate
        row.note = "" if rate is None else f"{rate:.0%} of routed experts were there"
        row.details["mapped"] = plan is not None and plan.are_device_readable
        bench.log.add(row)
        add_profile(bench, loaded, row)
        return row.median
