"""The fingerprint of a loaded model's caches: its files, settings, device and libraries (kvcache/fingerprint.py)."""

import hashlib
import json
import os
from functools import partial

import torch

from graphcore.checkpoint.file_bytes import explained
from graphcore.checkpoint.sources.known_hash import known_sha256
from graphcore.device import DTYPES, cpu_name
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.engine.program_runner import ProgramRunner
from graphcore.kernels.ops.kv_formats import FLOAT8
from graphcore.kvcache.fingerprint import CONTEXT, LAYERS, LONGROPE, PAGE, PRODUCTS, SOURCE, WEIGHTS
from graphcore.nn.rope_spec import LongScaling
from graphcore.nn.spec import ModelSpec
from graphcore.progress import Progress
from graphcore.weights.adapted_checkpoint import adapter_facts

INSTRUCTION_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables by which torch and its libraries choose kernels."""


def fingerprint_of(loaded: LoadedModel, runner: ProgramRunner, on_progress: Progress) -> dict[str, str]:
    """Return all that the bits of a loaded model's keys and values depend on, by name.

    Args:
        on_progress: callback while files of the model are hashed, unless their hashes are known.

    Raises:
        CheckpointError: a file of the model cannot be read any more.
    """
    runtime, settings = loaded.runtime, loaded.settings
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    kinds = [
        kind if isinstance(kind, str) else {**dtypes, FLOAT8: "fp8"}[kind] for kind in dict.fromkeys(runtime.kv_dtype)
    ]
    sizes = {table.page for table in runner.pages.tables}
    is_gpu = runtime.device.type == "cuda"
    return {
        WEIGHTS: weights_hash(loaded, runner, on_progress),
        "dtype": dtypes[runtime.dtype],
        "kv_dtype": ",".join(kinds),
        "quant": settings.quant.format,
        "quant.activations": settings.quant.activations,
        "prefill_chunk": str(runtime.prefill_chunk),
        PAGE: ",".join(map(str, sorted(sizes))),
        "graph": runtime.prefill,
        "device": torch.cuda.get_device_name(runtime.device) if is_gpu else f"{runtime.device.type} {cpu_name()}",
        "kernels": runtime.backend.kernels_name,
        **({} if is_gpu else {PRODUCTS: products_of(runtime)}),
        "torch": torch.__version__,
        SOURCE: " with adapter ".join([settings.model.checkpoint, *settings.model.adapters]),
        CONTEXT: str(runtime.context_length),
        **({} if runtime.share is None else {LAYERS: runtime.share.text}),
        **_longrope_facts(runner.builder.decoder.spec, runtime.context_length),
    }


def products_of(runtime: RuntimeConfig) -> str:
    """Return what multiplies prompts on the CPU; torch's sums depend on its threads and on its instructions."""
    if runtime.is_batch_invariant:
        return "C++ kernels"
    limits = [f"{name}={os.environ[name]}" for name in INSTRUCTION_LIMITS if name in os.environ]
    return ", ".join([f"torch with {torch.get_num_threads()} threads", *limits])


def _longrope_facts(spec: ModelSpec, context: int) -> dict[str, str]:
    """Return which of LongRoPE's lists a context of that many tokens takes; empty for a model without them."""
    scalings = [rope.scaling for rope, _ in spec.ropes]
    originals = [one.original_context for one in scalings if isinstance(one, LongScaling)]
    return {LONGROPE: "long_factor" if context > originals[0] else "short_factor"} if originals else {}


def weights_hash(loaded: LoadedModel, runner: ProgramRunner, on_progress: Progress) -> str:
    """Return a hash of a model's files and of its specification; the callback is that of `fingerprint_of`."""
    settings, folder = loaded.settings, loaded.settings.cache_folder / "hashes"
    files = sorted(loaded.loader.checkpoint.files)
    found = list[str]() if files else [settings.model.checkpoint, str(settings.seed)]  # random weights have no file
    for index, path in enumerate(files):
        with explained(path):
            found.append(known_sha256(path, folder, partial(on_progress, "check", None, index, len(files))))
    facts = json.dumps([repr(runner.builder.decoder.spec), found, *adapter_facts(loaded.loader.checkpoint, files)])
    return hashlib.sha256(facts.encode()).hexdigest()
