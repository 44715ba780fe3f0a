"""What a run was made on: card, driver, versions, commit, and how much RAM it may take and lock."""

import platform
import resource
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphcore.streaming.pinned_memory import Registrar
    from suite.bench import Bench
    from suite.log import Measurement

GIB = 1 << 30
MOST_LOCKED = 48 * GIB  # what a 70B in q4_k streams from, and some more
MOST_SECONDS = 12.0
LEFT = 8 * GIB  # of free RAM that is not locked
PACKAGES = ("graphcore", "torch", "triton", "transformers", "numpy", "safetensors")
QUERY = (
    "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,pcie.link.gen.max,pcie.link.width.max"
)


def describe_machine() -> dict[str, object]:
    """Return the record that stands at the head of a report."""
    import torch

    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "device": device.name if device else "cpu",
        "capability": f"{device.major}.{device.minor}" if device else None,
        "device_memory_bytes": device.total_memory if device else None,
        "driver": said_by("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device else None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu(),
        "cpu_count": torch.get_num_threads(),
        "ram": describe_ram(),
        "versions": {name: installed(name) for name in PACKAGES},
    }


def describe_ram() -> dict[str, int | None]:
    """Return bytes: the machine's, this process's control groups', what is free, and what `ulimit -l` lets it lock."""
    import psutil

    from graphcore.memory_limit import free_ram_nbytes, groups_of_self

    quota, whole = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], psutil.virtual_memory().total
    limits = [group.limit for group in groups_of_self() if group.limit < whole]  # more than there is limits nothing
    return {
        "machine": whole,
        "control_group": min(limits, default=None),
        "free": free_ram_nbytes(),
        "lock_quota": None if quota == resource.RLIM_INFINITY else quota,
    }


def ram_in_words(ram: dict[str, int | None]) -> str:
    """Return such a record for people."""
    words = {name: "no limit" if value is None else f"{value / GIB:.2f} GiB" for name, value in ram.items()}
    return (
        f"RAM {words['machine']}, control group {words['control_group']}, free {words['free']}; "
        f"may be locked (ulimit -l) {words['lock_quota']}"
    )


def run(bench: "Bench") -> None:
    """Measure how much RAM can be locked for the device, which no interface tells."""
    from graphcore.memory_limit import free_ram_nbytes
    from graphcore.streaming.pinned_memory import CudaRegistrar
    from suite.log import Measurement

    free, words = free_ram_nbytes(), ram_in_words(describe_ram())
    bench.log.add(Measurement("RAM that is free for this process", "GiB", [free / GIB], note=words))
    if not bench.is_dry:
        most = min(MOST_LOCKED, max(0, free - LEFT))
        bench.log.add(locked_row(CudaRegistrar(bench.device), most, MOST_SECONDS))


def locked_row(registrar: "Registrar", most: int, seconds: float, chunk: int = GIB) -> "Measurement":
    """Return the row of how much could be locked, chunk by chunk, until the machine refuses or the time is over."""
    from graphcore.host_pages import private_pages
    from graphcore.streaming.pinned_memory import Pins
    from suite.log import Measurement

    pins, locked, why = Pins(registrar), 0, "more was not tried"
    began = time.perf_counter()
    try:
        while locked + chunk <= most:
            if time.perf_counter() - began > seconds:
                why = f"stopped after {seconds:.0f} s"
                break
            obstacle = pins.add([private_pages(chunk)])
            if obstacle:
                why = f"then the machine refused: {obstacle}"
                break
            locked += chunk
    finally:
        took = time.perf_counter() - began
        pins.close()
    row = Measurement("RAM that could be locked", "GiB", [locked / GIB])
    row.note = f"{why}; {locked / took / 1e9:.1f} GB/s"
    return row


def commit(root: Path) -> str:
    """Return the commit of the checkout, with a + where files differ from it; "unknown" without git."""
    found = said_by("git", "-C", str(root), "rev-parse", "HEAD")
    if not found:
        return "unknown"
    return found[:12] + ("+" if said_by("git", "-C", str(root), "status", "--porcelain", "-uno") else "")


def said_by(*command: str) -> str:
    """Return the first line that a program prints, empty if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
