"""task=export: compile the blocks and heads of a model ahead of time, for starts with graph.artefacts=..."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import MISSING

from graphcore.compiler import compiler_version
from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import Settings
from graphcore.config.user_path import user_folder
from graphcore.config.validate import PROMPT_KEYS, refuse_unused_settings
from graphcore.device import find_cpp_compiler, resolve_device
from graphcore.engine.engine import Engine
from graphcore.engine.loading.runtime_config import machine_facts
from graphcore.engine.programs import Programs
from graphcore.errors import ConfigError
from graphcore.graph.artefacts import Artefacts, ArtefactWriter, model_facts
from graphcore.kernels.backend import NativeBackend
from graphcore.progress import Progress, ignore_progress
from graphcore.tasks.report.output_files import OutputError
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import describe, load_engine, own_runner


@dataclass
class ExportSettings:
    """The keys of conf/task/export.yaml."""

    name: str = MISSING
    output: str | None = MISSING
    overwrite: bool = MISSING


def check(settings: Settings, task: ExportSettings) -> None:
    """Check the settings.

    Raises:
        ConfigError: a setting has no effect, or does not fit the task.
    """
    refuse_unused_settings(settings, "export", PROMPT_KEYS)
    if settings.graph.kind != "compiled":
        raise ConfigError(f"task=export writes compiled blocks, and graph={settings.graph.kind}; add graph=compiled")
    if settings.graph.artefacts is not None:
        raise ConfigError("task=export compiles blocks anew, so that graph.artefacts has no effect; leave it out")
    if not task.output:
        raise ConfigError("task=export needs task.output=..., the folder to write, such as artefacts/smollm2")


def run(context: Context, task: ExportSettings) -> Record:
    """Write the packages, the kernels and the manifest, and print what was written."""
    device = resolve_device(context.settings.device)
    if device.type != "cpu":
        raise ConfigError(
            f"task=export writes packages for the CPU only, and this would run on {device}; add device=cpu"
        )
    folder = output_folder(task)
    began = time.perf_counter()
    with load_engine(context) as engine:
        load_seconds = time.perf_counter() - began
        context.console.note(describe(engine, load_seconds))
        began = time.perf_counter()
        with engine.while_idle():
            written = write_artefacts(engine, folder, context.console.progress)
        seconds = time.perf_counter() - began
    sizes = {name: (folder / name).stat().st_size for name in written.hashes}
    total = sum(sizes.values())
    context.console.table(
        f"{folder}: {in_words(total)}", ("file", "bytes"), [[name, f"{size:,}"] for name, size in sizes.items()]
    )
    return {
        "model": {"source": context.settings.model.checkpoint, "hash": written.facts["model"]},
        "output": {"path": str(folder.resolve()), "bytes": total},
        "facts": dict(written.facts),
        "files": [{"name": name, "bytes": size} for name, size in sizes.items()],
        "load_seconds": load_seconds,
        "export_seconds": seconds,
    }


def output_folder(task: ExportSettings) -> Path:
    """Return the folder to write, which now exists.

    Raises:
        ConfigError: the folder has something in it, and overwrite is not set.
        OutputError: the folder cannot be made.
    """
    folder = user_folder(str(task.output), "task.output=")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise OutputError(
            f"task.output={folder} cannot be written ({error.strerror}); choose another folder"
        ) from error
    if not is_empty and not task.overwrite:
        raise ConfigError(
            f"task.output={folder} is not empty; choose another folder, or set task.overwrite=true to write into it"
        )
    return folder


@torch.inference_mode()
def write_artefacts(engine: Engine, folder: Path, on_progress: Progress = ignore_progress) -> Artefacts:
    """Write the packages of all functions that an idle engine's programs call, and return what was written.

    Args:
        folder: an existing folder.
        on_progress: callback with the stage "export NAME", None, the function's number and 0.
    """
    runner, runtime = own_runner(engine, "export"), engine.choices
    names: list[str] = []

    def report(name: str) -> None:
        names.append(name)
        on_progress(f"export {name}", None, len(names), 0)

    writer = ArtefactWriter(folder, runner.builder.cache_dir, report)
    Programs(runner.builder.exporting(writer), runtime.batch_size).build_all()
    backend, compiler = runtime.backend, find_cpp_compiler()
    of_model = model_facts(runner.builder.decoder, runtime.packing.rounding, runtime.dtype, runtime.kv_dtype)
    return writer.finished(
        {**machine_facts(runner.device), **of_model},
        {
            "compiler": "" if compiler is None else compiler_version(compiler),
            "source": engine.settings.model.checkpoint,
            "batch_size": str(runtime.batch_size),
            "context_length": str(runtime.context_length),
        },
        backend.library if isinstance(backend, NativeBackend) else "",
        backend.copy_library(folder) if isinstance(backend, NativeBackend) else None,
    )


EXPORT = Task("export", ExportSettings, run, check)
