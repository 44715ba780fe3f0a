"""task=doctor: what this machine has for models, what fits, and a cure for what is missing; nothing is loaded."""

import mmap
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from omegaconf import MISSING

from graphcore.checkpoint.sources.inventory import cached_models
from graphcore.config.byte_sizes import in_words, rate_in_words
from graphcore.config.conf_folder import published_models
from graphcore.config.validate import PROMPT_KEYS, refuse_unused_settings
from graphcore.device import cpu_flags, cpu_name, find_cpp_compiler, resolve_device
from graphcore.kernels.backend import NativeBackend, find_backend
from graphcore.kernels.bandwidth import measure_read_bandwidth
from graphcore.kernels.gpu.registration import register
from graphcore.memory_limit import physical_ram_nbytes
from graphcore.planning.machine import RESERVE_NBYTES, Machine
from graphcore.processors import usable_processors
from graphcore.tasks.task import Context, Record, Task

LEVELS = ("amx_tile", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
READ_NBYTES = 16 << 20
LEAST_DISK = 10 << 30  # bytes, for a model and its packed copy


@dataclass
class DoctorSettings:
    """The keys of conf/task/doctor.yaml."""

    name: str = MISSING


@dataclass(frozen=True)
class Finding:
    """A fact about the machine.

    Attributes:
        subject: what it is about.
        found: what was found.
        cure: what to do if it is not as it should be; empty if it is.
    """

    subject: str
    found: str
    cure: str = ""


def run(context: Context, _task: DoctorSettings) -> Record:
    """Print the findings, those with a cure last."""
    settings, console = context.settings, context.console
    refuse_unused_settings(settings, "doctor", PROMPT_KEYS)
    findings = [
        *processor_findings(context),
        memory_finding(settings.device),
        disk_finding(settings.cache_folder),
        gpu_finding(),
        models_finding(settings.device),
    ]
    width = max(len(one.subject) for one in findings)
    for one in findings:
        console.line(f"{one.subject.ljust(width)}  {one.found}")
    cures = [one for one in findings if one.cure]
    console.line()
    for one in cures:
        console.line(f"{one.subject}: {one.cure}")
    if not cures:
        console.line("nothing is missing")
    return {"findings": [asdict(one) for one in findings]}


def processor_findings(context: Context) -> Iterator[Finding]:
    """Yield what computes on the CPU: the processor, its kernels, their rate of reading, and a compiler."""
    level = next((flag for flag in LEVELS if flag in cpu_flags()), "SSE2")
    yield Finding("processor", f"{cpu_name()}, {usable_processors()} usable, {level}")
    cpu = torch.device("cpu")
    backend, note = find_backend(cpu, context.settings.cache_folder, context.console.progress)
    if isinstance(backend, NativeBackend):
        rate = measure_read_bandwidth(cpu, backend)
        speed = "" if rate is None else f", {rate_in_words(rate.best)} of memory"
        yield Finding("kernels", Path(backend.library).name + speed, note)
    else:
        yield Finding("kernels", "none: torch alone computes, many times slower", f"{note}; apt install g++")
    compiler = find_cpp_compiler()
    yield Finding(
        "compiler",
        compiler or "none",
        "" if compiler else "graph=compiled runs eager on the CPU without one; apt install g++",
    )


def memory_finding(device: str) -> Finding:
    """Return what memory models may take."""
    free = Machine.here(resolve_device("cpu" if device == "auto" else device)).ram_nbytes
    total, kept = in_words(physical_ram_nbytes()), in_words(RESERVE_NBYTES)
    found = f"{in_words(free)} of {total} may be taken; {kept} of what is free are left to the system"
    cure = "end other programs, or stream weights within a budget: streaming=auto" if free < (1 << 30) else ""
    return Finding("memory", found, cure)


def disk_finding(cache: Path) -> Finding:
    """Return where models are kept, how much room is there, and how fast one of them is read past the page cache."""
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    cure = f"less than {in_words(LEAST_DISK)} are free; graphcore list shows what could go, cache_dir=... moves it"
    files = [path for one in cached_models(cache) for path in (one.path, *one.path.rglob("*")) if path.is_file()]
    rate = direct_read_rate(max(files, key=lambda path: path.stat().st_size)) if files else None
    speed = "" if rate is None else f", read at {rate_in_words(rate)}"
    return Finding("disk", f"{in_words(free)} free in {cache}{speed}", cure if free < LEAST_DISK else "")


def direct_read_rate(path: Path, seconds: float = 0.5) -> float | None:
    """Return the bytes/s at which a file is read past the page cache; None where that is not possible."""
    buffer = mmap.mmap(-1, READ_NBYTES)
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):  # no system, or no file system, for it
        return None
    try:
        began, nbytes = time.perf_counter(), 0
        while time.perf_counter() - began < seconds and (read := os.preadv(file, [buffer], nbytes)) == READ_NBYTES:
            nbytes += read
        return nbytes / (time.perf_counter() - began) if nbytes else None
    except OSError:
        return None
    finally:
        os.close(file)


def gpu_finding() -> Finding:
    """Return which GPU there is, and whether its kernels can run."""
    if not torch.cuda.is_available():
        is_cpu_build = torch.version.cuda is None
        cure = "pip install torch built for CUDA" if is_cpu_build else "torch finds no device: see nvidia-smi's driver"
        return Finding("GPU", f"none for torch {torch.__version__}", cure if shutil.which("nvidia-smi") else "")
    free, total = torch.cuda.mem_get_info()
    name = f"{torch.cuda.get_device_name()}, {in_words(free)} of {in_words(total)} free"
    return Finding("GPU", name, "" if register() else "Triton's kernels need triton and a C compiler; apt install gcc")


def models_finding(device: str) -> Finding:
    """Return how many of the model groups would be resident."""
    free = Machine.here(resolve_device(device)).memory.free_nbytes
    models = [model for model in published_models() if model.is_default]
    fitting = sorted((model for model in models if model.nbytes < free), key=lambda model: model.nbytes)
    largest = f"; the largest is {fitting[-1].name}, {in_words(fitting[-1].nbytes)}" if fitting else ""
    return Finding(
        "models",
        f"{len(fitting)} of {len(models)} fit as graphcore list has them{largest}; others stream (graphcore plan)",
    )


TASK = Task("doctor", DoctorSettings, run)
