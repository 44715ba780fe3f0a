"""What NVIDIA's own tools say: errors of memory and races in a captured step, and where kernels spend their time.

A tool that is not there, or is not permitted, leaves a row with the reason.
"""

import csv
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from suite.bench import Bench
from suite.correctness import own_environment
from suite.log import Line, Measurement

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
CHECKS = ("memcheck", "racecheck")
CHECK_SECONDS = 60
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue %",
    "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
}
KERNELS = "regex:product|gated|attend|gate_up|down"  # six of a dense step: qkv, attention, o, gate and up, down, head
PROFILED = ("llama3_8b random:bf16", "llama3_8b random:q4_k")
KERNEL_SECONDS = 90


def sanitizer(bench: Bench) -> None:
    """Run the smallest captured step under memcheck and racecheck, once it has been compiled without them."""
    program = find_tool("compute-sanitizer")
    if program is None:
        bench.log.add(absent("compute-sanitizer"))
        return
    step = step_command(bench, "tiny", "llama3_8b random:q4_k")
    subprocess.run(step, check=True, timeout=CHECK_SECONDS, env=own_environment())
    for check in CHECKS:
        command = [program, "--tool", check, "--target-processes", "application-only", *step]
        bench.log.add(check_row(check, said_by(command, CHECK_SECONDS)))


def ncu(bench: Bench) -> None:
    """Profile the products and the attention of one layer and the head, in two formats."""
    program = find_tool("ncu")
    if program is None:
        bench.log.add(absent("ncu"))
        return
    for which in PROFILED:
        step = step_command(bench, "true", which)
        how = ["--clock-control", "none", "--profile-from-start", "off", "--kernel-name", KERNELS]
        command = [program, *how, "--metrics", ",".join(METRICS), "--csv", "--page", "raw", *step]
        text = said_by(command, KERNEL_SECONDS)
        rows = [kernel_row(which, number, kernel) for number, kernel in enumerate(kernels_of(text), 1)]
        for row in rows or [Measurement(f"ncu, {which}", "kernels", [0.0], note=last_words(text))]:
            bench.log.add(row)


def find_tool(name: str, roots: Sequence[Path] | None = None) -> str | None:
    """Return the path of one of CUDA's programs: in PATH, in CUDA's own folders, or in NVIDIA's wheels."""
    found = shutil.which(name)
    if found:
        return found
    patterns = (f"bin/{name}", f"{name}/{name}", f"extras/*/{name}", f"*/bin/{name}", f"*/{name}/{name}")
    for root in tool_folders() if roots is None else roots:
        for pattern in patterns:
            for path in sorted(root.glob(pattern)):
                if os.access(path, os.X_OK) and path.is_file():
                    return str(path)
    return None


def tool_folders() -> list[Path]:
    """Return the folders that CUDA's programs may lie in."""
    named = [Path(os.environ[key]) for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ]
    installed = [*sorted(Path("/usr/local").glob("cuda*")), *sorted(Path("/opt/nvidia").glob("*"))]
    wheel = importlib.util.find_spec("nvidia")
    places = [] if wheel is None else [Path(place) for place in wheel.submodule_search_locations or ()]
    return [*named, *installed, *places]


def absent(name: str) -> Measurement:
    note = f"{name} is not there: not in PATH, CUDA_HOME, /usr/local/cuda*, /opt/nvidia or NVIDIA's wheels"
    return Measurement(name, "found", [0.0], note=note)


def step_command(bench: Bench, size: str, which: str) -> list[str]:
    model, checkpoint = which.split()
    cache = "" if bench.cache_dir is None else str(bench.cache_dir)
    device = "cpu" if bench.is_dry else "cuda:0"
    return [sys.executable, "-m", "suite.tool_step", device, size, model, checkpoint, cache]


def said_by(command: Sequence[str], seconds: int) -> str:
    """Return all that a program prints, up to where its time is over; the suite's log has it too."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
            env=own_environment(),
        )
        text = done.stdout
    except subprocess.TimeoutExpired as ended:
        before = ended.stdout.decode(errors="replace") if isinstance(ended.stdout, bytes) else ended.stdout or ""
        text = f"{before}\nkilled after {seconds} s"
    print(text, flush=True)
    return text


def check_row(check: str, text: str) -> Measurement:
    """Return the row of one check: the number in its summary, or what it said instead of one."""
    name = f"a tiny captured step under {check}"
    found = SUMMARY.search(text)
    if found is None:
        return Measurement(name, "came to its end", [0.0], note=last_words(text))
    count = int(found[1])
    words = [line for line in text.splitlines() if line.startswith("=========")]
    row = Measurement(name, "errors", [float(count)], details={"said": words[:200]})
    return row.aim("none", count == 0)


def last_words(text: str) -> str:
    """Return why a tool did not answer: its own line about an error, or its last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERR_" in line or line.startswith(("==ERROR==", "========= Error"))]
    return (errors or lines or ["it said nothing"])[-1][:300]


def kernels_of(text: str) -> Iterator[Line]:
    """Yield the kernels of ncu's raw page as CSV: a line of names, one of units, and one for each kernel."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = csv.DictReader(line for line in lines[begin:] if line.startswith('"'))
    units: Line = next(table, {})
    for kernel in table:
        yield {key: (value, units[key]) for key, value in kernel.items() if key is not None}


def kernel_row(which: str, number: int, kernel: Line) -> Measurement:
    """Return the row of one kernel: its time, and the other metrics as a note."""
    found = {word: kernel[name] for name, word in METRICS.items() if name in kernel}
    time, unit = found.pop("time")
    microseconds = number_of(time) * {"n": 1e-3, "u": 1.0, "m": 1e3}[unit[0]]  # "ns" or "nsecond", by version
    grid = kernel.get("Grid Size", ("", ""))[0]
    row = Measurement(f"ncu, {which}: {number} {kernel['Kernel Name'][0]} {grid}".rstrip(), "us", [microseconds])
    row.note = ", ".join(f"{word} {number_of(value):.4g}" for word, (value, _) in found.items())
    row.details = {word: number_of(value) for word, (value, _) in found.items()}
    return row


def number_of(text: str) -> float:
    return float(text.replace(",", ""))
