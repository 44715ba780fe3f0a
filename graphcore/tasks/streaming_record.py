"""A streaming report for people and for result.json."""

from graphcore.config.byte_sizes import in_words, rate_in_words
from graphcore.streaming.report import StreamingReport, TierMemory
from graphcore.tasks.task import Record

MOVED = (
    "link_gb_per_second",
    "wall_gb_per_second",
    "raw_link_gb_per_second",
    "link_share",
    "bytes_per_token",
    "overlap",
    "copy_seconds",
    "stall_seconds",
    "stall_seconds_per_group",
    "device_peak_bytes",
    "device_budget_bytes",
    "host_peak_bytes",
    "host_budget_bytes",
    "expert_hit_rate",
)


def streaming_record(policy: str, report: StreamingReport | None, expert_hit_rate: float | None = None) -> Record:
    """Return what moved, as result.json has it.

    Args:
        policy: off, on or auto.
        report: of the measured decode steps; None where nothing streams, and then all but the policy is null.
        expert_hit_rate: share of the routed experts that were on the device already; None without an expert cache.
    """
    if report is None:
        return {"policy": policy, **dict.fromkeys(MOVED)}
    return {
        "policy": policy,
        "link_gb_per_second": _gb(report.busy_link),
        "wall_gb_per_second": _gb(report.wall_link),
        "raw_link_gb_per_second": _gb(report.raw_link),
        "link_share": report.busy_link_share,
        "bytes_per_token": report.nbytes_per_pass,
        "overlap": report.overlap,
        "copy_seconds": report.copy_seconds,
        "stall_seconds": report.stall_seconds,
        "stall_seconds_per_group": list(report.stall_seconds_per_group),
        "device_peak_bytes": report.device.peak_nbytes,
        "device_budget_bytes": report.device.budget_nbytes,
        "host_peak_bytes": report.host.peak_nbytes,
        "host_budget_bytes": report.host.budget_nbytes,
        "expert_hit_rate": expert_hit_rate,
    }


def streaming_lines(policy: str, report: StreamingReport, expert_hit_rate: float | None = None) -> list[str]:
    """Return the same in three lines: the link, what it cost, memory; what is not known is left out."""
    lines = [f"streaming={policy}: {_link_words(report)}", _wait_words(report)]
    memory = [_memory_words("device", report.device), _memory_words("host", report.host)]
    hits = "" if expert_hit_rate is None else f"{expert_hit_rate:.0%} of routed experts were there already"
    known = [words for words in (*memory, hits) if words]
    return [*lines, "; ".join(known)] if known else lines


def _link_words(report: StreamingReport) -> str:
    if report.busy_link is None or report.wall_link is None or report.nbytes_per_pass is None:
        return "nothing moved"
    words = f"{in_words(report.nbytes_per_pass)} per step, {rate_in_words(report.busy_link)} while copying"
    if report.busy_link_share is not None and report.raw_link is not None:
        words += f" ({report.busy_link_share:.0%} of the raw link's {rate_in_words(report.raw_link)})"
    return f"{words}, {rate_in_words(report.wall_link)} over all the time"


def _wait_words(report: StreamingReport) -> str:
    hidden = (
        "" if report.overlap is None else f"{report.overlap:.0%} of {report.copy_seconds:.2f} s of copying hidden; "
    )
    words = f"{hidden}waited {report.stall_seconds:.2f} s of {report.seconds:.2f} s"
    if not report.stall_seconds:
        return words
    worst = max(range(len(report.stall_seconds_per_group)), key=report.stall_seconds_per_group.__getitem__)
    return f"{words}, longest for group {worst} ({report.stall_seconds_per_group[worst]:.2f} s)"


def _memory_words(tier: str, memory: TierMemory) -> str:
    if memory.peak_nbytes is None:
        return ""
    words = f"{tier} peak {in_words(memory.peak_nbytes)}"
    if memory.budget_nbytes is None:
        return words
    return f"{words} of {in_words(memory.budget_nbytes)} allowed"


def _gb(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9
