"""What a rank says of itself before it reads weights, and errors of loading that all ranks learn of."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version

import torch

from graphcore import __version__
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.file_identity import sampled_hash
from graphcore.config.settings import BatchingSettings, Settings
from graphcore.device import cpu_flags
from graphcore.engine.loading.model_loader import PreparedModel
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.parallel.handshake import ADAPTERS, DEVICE, FILE, GRAPH, KERNELS, PROCESSOR, Facts, compare_ranks
from graphcore.parallel.process_group import ProcessGroup
from graphcore.weights.adapted_checkpoint import adapter_facts, adapters_of

LIMITS = ("batching", "context_length")
"""Settings of rank 0 that hold for all ranks; its task may have set them."""
OWN = (
    *("task", "sampling", *LIMITS, "batch_size", "max_new_tokens", "system", "stop", "chat", "chat_history"),
    "repetition_detection",
    *("special_tokens", "device", "threads", "cache_dir", "progress", "outputs", "cache", "debug"),
    *("prompt", "prompt_file", "prompt_ids"),
)
"""Settings that may differ between ranks, or that only rank 0 uses."""
PATHS = ("checkpoint", "adapter")
"""Keys of `model` that name files, whose contents are compared."""
COMPARED = {"streaming": ("policy", "layer_group_size"), "parallel": ("split", "transport")}
"""Keys of `streaming` and `parallel` that must be equal on all ranks; their other keys may differ between machines."""
PRODUCTS = frozenset({"avx512_bf16", "amx_tile"})
"""Processor features that change how prompts are multiplied, besides those that choose the kernels."""


@contextmanager
def together(ranks: ProcessGroup | None) -> Iterator[None]:
    """Load in the block on all ranks; if it raises on one, wherever it is, the others raise, too, and all leave.

    Only one such block runs at a time, and all ranks call `all_say` as often in it.

    Raises:
        ParallelError: the block has raised on another rank, whose error the message has, or a rank was lost.
    """
    if ranks is None:
        yield
        return
    try:
        yield
        ranks.all_say(None)
        ranks.end_loading()
    except BaseException as error:
        try:
            if isinstance(error, Exception):  # Ctrl-C does not wait for ranks that may read weights for minutes
                ranks.say_error(error)
        finally:
            ranks.leave(error)
        raise


def agreed_settings(settings: Settings, ranks: ProcessGroup) -> Settings:
    """Return the settings with rank 0's limits of sequences and tokens.

    Raises:
        ParallelError: ranks have other versions or settings.
    """
    given = asdict(settings)
    told = ranks.all_say([given_facts(settings), *(given[name] for name in LIMITS)])
    compare_ranks([facts for facts, *_ in told])
    _, batching, context_length = told[0]
    return replace(settings, batching=BatchingSettings(**batching), context_length=context_length)


def given_facts(settings: Settings) -> Facts:
    """Return the versions and settings that this rank was started with, but for those that may differ."""
    own = {name: value for name, value in asdict(settings).items() if name not in OWN}
    own["model"] = {name: value for name, value in own["model"].items() if name not in PATHS}  # they may differ
    own.update({group: {name: own[group][name] for name in names} for group, names in COMPARED.items()})
    return {
        "graphcore": __version__,
        "torch": torch.__version__,
        **{key: json.dumps(value, default=str) for name, given in own.items() for key, value in _keys_of(name, given)},
    }


def _keys_of(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the keys of a setting or of a group of settings, and their values."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield f"{name}.{key}", one
    else:
        yield name, value


def found_facts(parts: PreparedModel) -> Facts:
    """Return what this rank's results depend on besides versions and settings: its files, kernels and plan."""
    runtime, stored = parts.runtime, (parts.loader.beneath or parts.loader).checkpoint
    processor, build = processor_and_kernels(runtime)
    return {
        DEVICE: runtime.device.type,
        "layers": "" if runtime.share is None else ",".join(map(str, runtime.share.owners)),
        "context_length": str(runtime.context_length),
        "speculation": f"{runtime.speculation} of {runtime.draft_tokens} tokens {runtime.draft_format}",
        "dtype": str(runtime.dtype),
        GRAPH: f"{runtime.graph} and {runtime.prefill}, with{'' if runtime.backend.has_kernels else 'out'} kernels",
        KERNELS: build,
        "files": tensors_hash(stored),
        **{FILE + path.name: sampled_hash(path, one.size)[:16] for path, one in stored.files.items()},
        ADAPTERS: adapters_hash(parts.loader.checkpoint),
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


def adapters_hash(checkpoint: Checkpoint) -> str:
    """Return a hash of the adapters' files, weights and scales; "none" if no adapter changes a weight."""
    files = {path: identity for one in adapters_of(checkpoint) for path, identity in one.files.items()}
    if not files:
        return "none"
    hashes = [sampled_hash(path, identity.size) for path, identity in files.items()]
    return hashlib.sha256(json.dumps([hashes, *adapter_facts(checkpoint, [*files])]).encode()).hexdigest()[:16]
