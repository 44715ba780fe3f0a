"""Counts what torch's CPU allocator gives out."""

import json
from collections.abc import Callable
from pathlib import Path

import torch


def peak_nbytes(work: Callable[[], object], folder: Path) -> int:
    """Return the most bytes that torch's allocator had given out at once while the calling thread did some work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    held = [event["args"] for event in events if event["name"] == "[memory]"]
    before = held[0]["Total Allocated"] - held[0]["Bytes"]  # what earlier profiles have left in the counter
    return max(one["Total Allocated"] for one in held) - before
