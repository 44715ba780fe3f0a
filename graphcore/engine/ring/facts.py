"""What a rank says of itself before it reads weights, and errors of loading that all ranks learn of."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import torch

from graphcore import __version__
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.file_identity import sampled_hash
from graphcore.config.settings import BatchingSettings, Settings
from graphcore.device import cpu_flags
from graphcore.engine.loading.model_loader import PreparedModel
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.parallel.handshake import DEVICE, FILE, GRAPH, KERNELS, PROCESSOR, Facts, refuse_any
from graphcore.parallel.process_group import ProcessGroup

OWN = (
    *("parallel", "task", "sampling", "batch_size", "max_new_tokens", "system", "stop", "chat", "special_tokens"),
    *("device", "threads", "cache_dir", "progress", "outputs", "cache", "debug", "prompt", "prompt_file", "prompt_ids"),
)
"""Settings that may differ between ranks, or that only rank 0 uses."""
DEALING = ("policy", "layer_group_size")
"""Keys of `streaming` that the deal of layers follows from."""
PRODUCTS = frozenset({"avx512_bf16", "amx_tile"})
"""Processor features that change how prompts are multiplied, besides those that choose the kernels."""


@contextmanager
def together(ranks: ProcessGroup | None) -> Iterator[None]:
    """Run the block on all ranks; if it raises on one, the others raise, too, and none waits for it.

    Raises:
        ParallelError: the block has raised on another rank; the message has its error.
    """
    if ranks is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        ranks.all_say(str(error) or type(error).__name__)
        raise
    refuse_any(ranks.all_say(None), ranks.rank)


def with_batching_of_lead(settings: Settings, ranks: ProcessGroup) -> Settings:
    """Return the settings with rank 0's limits of sequences and tokens, which its task may have set."""
    told: list[dict[str, Any]] = ranks.all_say(asdict(settings.batching))
    return replace(settings, batching=BatchingSettings(**told[0]))


def facts_of(settings: Settings, parts: PreparedModel) -> Facts:
    """Return what this rank's results depend on, besides its place among the ranks."""
    runtime = parts.runtime
    own = {name: value for name, value in asdict(settings).items() if name not in OWN}
    own["model"] = {name: value for name, value in own["model"].items() if name != "checkpoint"}  # a path may differ
    own["streaming"] = {name: own["streaming"][name] for name in DEALING}  # budgets are each machine's own
    processor, build = processor_and_kernels(runtime)
    return {
        "graphcore": __version__,
        "torch": torch.__version__,
        **{name: json.dumps(value, sort_keys=True, default=str) for name, value in own.items()},
        "layers": "" if runtime.share is None else ",".join(map(str, runtime.share.owners)),
        "context_length": str(runtime.context_length),
        "speculation": f"{runtime.speculation} of {runtime.draft_tokens} tokens {runtime.draft_format}",
        "dtype": str(runtime.dtype),
        DEVICE: runtime.device.type,
        GRAPH: f"{runtime.graph} and {runtime.prefill}, with{'' if runtime.backend.has_kernels else 'out'} kernels",
        KERNELS: build,
        "files": tensors_hash(parts.loader.checkpoint),
        **{FILE + path.name: sampled_hash(path, one.size)[:16] for path, one in parts.loader.checkpoint.files.items()},
        PROCESSOR: processor,
    }


def processor_and_kernels(runtime: RuntimeConfig) -> tuple[str, str]:
    """Return what the bits of products depend on: an instruction set or a GPU, and the build of its kernels."""
    if runtime.device.type == "cuda":
        name, capability = torch.cuda.get_device_name(runtime.device), torch.cuda.get_device_capability(runtime.device)
        triton = version("triton") if runtime.backend.has_kernels else "none"
        return f"{name} of compute capability {capability[0]}.{capability[1]}", f"triton {triton}"
    instruction_set, _, build = runtime.backend.kernels_name.rpartition("-")
    return " ".join([instruction_set.removeprefix("kernels-"), *sorted(cpu_flags() & PRODUCTS)]), build


def tensors_hash(checkpoint: Checkpoint) -> str:
    """Return a hash of a checkpoint's tensors and of the names of their files, whose folders may differ."""
    tensors = [
        [name, info.encoding, list(info.shape), sorted({span.file.name for span in checkpoint.spans(name)})]
        for name, info in checkpoint.tensors.items()
    ]
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()[:16]
