"""What a run was made on: card, driver, versions, commit."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
        "versions": {name: installed(name) for name in PACKAGES},
    }


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
