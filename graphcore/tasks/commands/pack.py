"""task=pack: write the model as one GGUF file, its matrices packed as `quant` says; llama.cpp loads it too."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import MISSING

from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import Settings
from graphcore.config.user_path import user_path
from graphcore.config.validate import PROMPT_KEYS, refuse_unused_settings
from graphcore.device import use_threads
from graphcore.engine.loading.open_model import open_model
from graphcore.errors import ConfigError
from graphcore.export.pack import PackedTensor, Packer
from graphcore.kernels.backend import find_backend
from graphcore.progress import Progress
from graphcore.quant.format_choice import STORED
from graphcore.tasks.report.output_files import OutputError
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import group_note

UNUSED_KEYS = (*PROMPT_KEYS, "context_length")
COLUMNS = ("format", "tensors", "bytes", "largest relative error")


@dataclass
class PackSettings:
    """The keys of conf/task/pack.yaml."""

    name: str = MISSING
    output: str | None = MISSING
    overwrite: bool = MISSING
    requantize: bool = MISSING
    for_llama_cpp: bool = MISSING


def run(context: Context, task: PackSettings) -> Record:
    """Write the file and print its formats and sizes."""
    settings, console = context.settings, context.console
    refuse_settings_without_effect(settings, task)
    path = output_path(task)
    use_threads(settings.threads)
    began = time.perf_counter()
    model = open_model(settings.model, settings.seed, settings.cache_folder, console.progress)
    if model.path is not None and model.path.exists() and path.exists() and path.samefile(model.path):
        raise ConfigError(f"task.output={path} is the model itself; choose another name")
    on_tokenizer = model.tokenizer.notes if model.tokenizer is not None else tuple(filter(None, (model.unread,)))
    backend, on_kernels = find_backend(torch.device("cpu"), settings.cache_folder, console.progress)
    packer = Packer(model, settings.quant.format, backend, task.requantize, settings.model.recommended_sampling)
    packer.check_adapters()
    if task.for_llama_cpp:
        packer.check_llama_cpp()
    on_weights = (*filter(None, (on_kernels,)), *packer.notes(), *group_note(context, model.config.model_type))
    notes = (*model.config.notes, *on_tokenizer, *on_weights)
    for note in notes:
        console.note(note)
    tensors = packed_tensors(packer, path, console.progress)
    nbytes = path.stat().st_size
    console.table(f"{path}: {in_words(nbytes)}", COLUMNS, table_rows(tensors))
    return {
        "model": {
            "source": settings.model.checkpoint,
            "model_type": model.config.model_type,
            "num_hidden_layers": model.config.num_hidden_layers,
        },
        "notes": list(notes),
        "output": {"path": str(path.resolve()), "bytes": nbytes},
        "format": settings.quant.format,
        "memory": {"packing_bytes": packer.peak_nbytes},
        "pack_seconds": time.perf_counter() - began,
        "tensors": [tensor_record(tensor) for tensor in tensors],
        "total": total_record(tensors),
    }


def refuse_settings_without_effect(settings: Settings, task: PackSettings) -> None:
    """Refuse settings that have no effect with this task.

    Raises:
        ConfigError: one is.
    """
    refuse_unused_settings(settings, "pack", UNUSED_KEYS)
    if settings.streaming.policy != "off":
        raise ConfigError(
            f"streaming={settings.streaming.policy} has no effect with task=pack, which runs nothing; leave it out"
        )
    if task.requantize and settings.quant.format == STORED:
        raise ConfigError("task.requantize=true has no effect with quant=stored; name a format, such as quant=q4_k")
    if settings.model.fallback is not None:
        raise ConfigError(
            "model.fallback has no effect with task=pack, which knows graphcore's own models; leave it out"
        )


def packed_tensors(packer: Packer, path: Path, on_progress: Progress) -> list[PackedTensor]:
    """Write the file and return its tensors.

    Raises:
        OutputError: the file cannot be written.
    """
    try:
        return list(packer.pack(path, on_progress))
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror or error}); free space or choose task.output=..."
        ) from error


def output_path(task: PackSettings) -> Path:
    """Return the file to write.

    Raises:
        ConfigError: no file is named, it is a folder, or it exists and may not be replaced.
    """
    if not task.output:
        raise ConfigError("task=pack needs task.output=..., the file to write, such as model-q4_k.gguf")
    path = user_path(task.output, "task.output=")
    if path.is_dir():
        raise ConfigError(f"task.output={path} is a folder; name a file in it")
    if path.exists() and not task.overwrite:
        raise ConfigError(f"task.output={path} is there already; choose another name or set task.overwrite=true")
    return path


def table_rows(tensors: list[PackedTensor]) -> list[list[str]]:
    """Return a row of the table for each format, the one with most bytes first."""
    nbytes: Counter[str] = Counter()
    for tensor in tensors:
        nbytes[tensor.entry.encoding] += tensor.entry.nbytes
    rows = []
    for encoding, size in nbytes.most_common():
        same = [tensor for tensor in tensors if tensor.entry.encoding == encoding]
        rows.append([encoding, str(len(same)), f"{size:,}", f"{max(tensor.error for tensor in same):.5f}"])
    return rows


def tensor_record(tensor: PackedTensor) -> Record:
    """Return a tensor's entry in result.json."""
    entry = tensor.entry
    return {
        "name": entry.name,
        "format": entry.encoding,
        "shape": list(entry.shape),
        "bytes": entry.nbytes,
        "relative_error": tensor.error,
    }


def total_record(tensors: list[PackedTensor]) -> Record:
    """Return the sums: tensors, bytes, and bits per weight."""
    nbytes = sum(tensor.entry.nbytes for tensor in tensors)
    num_weights = sum(tensor.entry.num_elements for tensor in tensors)
    return {
        "tensors": len(tensors),
        "weights": num_weights,
        "bytes": nbytes,
        "bits_per_weight": 8 * nbytes / num_weights,
    }


PACK = Task("pack", PackSettings, run)
