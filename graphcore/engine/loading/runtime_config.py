"""The runtime configuration: what settings leave to the machine. Device, dtype, graph kinds, context, kernels."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from graphcore.arch.config.rope_parameters import advice_on_context
from graphcore.build_folder import build_folder, temporary_folder
from graphcore.config.settings import Settings
from graphcore.config.user_path import lacks_home
from graphcore.device import DTYPES, find_cpp_compiler, resolve_device, resolve_dtype
from graphcore.engine.loading.kv_dtype import choose_kv_types, note_on_kv_types
from graphcore.engine.loading.open_model import Model
from graphcore.errors import ConfigError, GraphError
from graphcore.graph.compile import code_folder
from graphcore.kernels.cpu.library import can_have_kernels, find_library, loads
from graphcore.kernels.gpu.pdl import FIRST_CAPABILITY, supports_pdl
from graphcore.kernels.gpu.registration import register
from graphcore.kernels.ops.kv_formats import KVTypes
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.spec import DeltaSpec, ModelSpec
from graphcore.planning.machine import free_device_nbytes
from graphcore.progress import Progress, ignore_progress
from graphcore.weights.packed_weights import PackingPolicy
from graphcore.weights.plan import Plan, Tier

FREE_SHARE = 0.8  # share of free memory that weights may take when they are unpacked at load
NO_HOME = "no home folder is known: cache_dir is a temporary folder, which the next start does not find; set cache_dir"
DEFAULT_CONTEXT = 4096  # tokens; the whole context of a modern model would take gigabytes of KV cache


@dataclass(frozen=True)
class RuntimeConfig:
    """The device, dtype, graph kinds and sizes that follow from the settings on a machine.

    Attributes:
        kv_dtype: what keys and values are kept as.
        graph: how decode steps run: "captured", "compiled" or "eager".
        prefill: how everything else runs, prompts and decode steps that are not captured: "compiled" or "eager".
        context: most tokens of KV cache of one sequence.
        cache_tokens: tokens of KV cache that all sequences share; None follows from the context.
        snapshots: copies of recurrent states beside those of the sequences.
        packing: policy of how packed weights are held and multiplied.
        is_dependent: whether a captured step's kernels are launched dependently (kernels/gpu/pdl.py).
        notes: lines about choices that graphcore made or that may surprise.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: KVTypes
    graph: str
    prefill: str
    context: int
    batch_size: int
    prefill_chunk: int
    packing: PackingPolicy
    notes: tuple[str, ...]
    cache_tokens: int | None = None
    snapshots: int = 0
    is_dependent: bool = False

    def cache_sizes(self, context: int) -> CacheSizes:
        """Return what the caches hold for sequences of at most `context` tokens."""
        shared = self.cache_tokens or max(context, self.batch_size * min(context, DEFAULT_CONTEXT))
        kept = context, self.kv_dtype, self.prefill_chunk
        return CacheSizes(self.batch_size, *kept, tokens=shared, snapshots=self.snapshots)

    def within(self, plan: Plan, tier: Tier) -> "RuntimeConfig":
        """Return the choices with the plan's context, which may be smaller, and with the plan's notes."""
        context = self.context if plan.context is None else plan.context
        notes = (*self.notes, *plan.notes, *([tier.note] if tier.note and plan.is_streaming else []))
        return replace(self, context=context, prefill_chunk=min(self.prefill_chunk, context), notes=notes)


def runtime_config_here(settings: Settings, model: Model, on_progress: Progress = ignore_progress) -> RuntimeConfig:
    """Return the choices for a model on this machine, building the C++ kernels where that is still to be done.

    Args:
        on_progress: callback while kernels are built.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype.name, model.dtype, device)
    library, library_note = find_kernels(settings.cache_folder, device, on_progress)
    on_gpu = device.type == "cuda" and register()
    choices = runtime_config_on(settings, model, device, dtype, library, on_gpu)
    packing = replace(choices.packing, dense_nbytes=room_for_dense(settings, device))
    is_dependent, dependence_note = choose_dependence(settings.dependent_launches, choices.graph, device)
    code_note = code_folder(settings.cache_folder, device)[1] if choices.prefill == "compiled" else ""
    home_note = NO_HOME if lacks_home(settings.cache_dir) else ""
    added = (home_note, library_note, code_note, dependence_note)
    notes = (*choices.notes, *(note for note in added if note))
    return replace(choices, packing=packing, is_dependent=is_dependent, notes=notes)


def runtime_config_on(
    settings: Settings, model: Model, device: torch.device, dtype: torch.dtype, library: Path | None, on_gpu: bool
) -> RuntimeConfig:
    """Return the choices for a model on a device, which need not be in this machine.

    Args:
        dtype: compute dtype.
        library: the library of C++ kernels; None where there is none.
        on_gpu: True where Triton kernels multiply packed weights.

    Raises:
        ConfigError: the device or the model cannot do what was asked.
    """
    has_kernels = library is not None or on_gpu
    graph, prefill, graph_note = choose_graph(settings.graph.kind, device, has_kernels)
    context = choose_context(settings, model.spec.context, advice_on_context(model.config.rope))
    kv_types = choose_kv_types(settings.kv_dtype, model, dtype, device)
    return RuntimeConfig(
        device=device,
        dtype=dtype,
        kv_dtype=kv_types,
        graph=graph,
        prefill=prefill,
        context=context,
        cache_tokens=settings.batching.cache_tokens,
        snapshots=choose_snapshots(settings, model.spec),
        batch_size=settings.batching.max_sequences,
        prefill_chunk=min(settings.prefill_chunk, context),
        packing=PackingPolicy(
            library, choose_rounding(settings.quant.activations, dtype), settings.quant.format, on_gpu=on_gpu
        ),
        notes=(*model.config.notes, *([graph_note] if graph_note else []), *note_on_kv_types(kv_types, model)),
    )


def room_for_dense(settings: Settings, device: torch.device) -> int:
    """Return the bytes that weights unpacked at load may take; 0 on a GPU and where weights are streamed."""
    if device.type != "cpu" or settings.streaming.policy != "off":
        return 0
    return int(FREE_SHARE * free_device_nbytes(device))


def choose_context(settings: Settings, longest: int, advice: str = "") -> int:
    """Return the tokens of KV cache for each sequence.

    Args:
        longest: most tokens that the model was trained for.
        advice: what to do for more tokens, after a semicolon.

    Raises:
        ConfigError: the settings ask for more tokens than that.
    """
    shared = settings.batching.cache_tokens or longest
    context = settings.context_length or min(longest, DEFAULT_CONTEXT, shared)
    if context > longest:
        raise ConfigError(f"context_length={context}, but the model was made for {longest} tokens{advice}")
    if context > shared:
        raise ConfigError(
            f"context_length={context}, but batching.cache_tokens={shared} is all that sequences share, so that none "
            "could come so far; set less context_length, or more batching.cache_tokens"
        )
    return context


def choose_snapshots(settings: Settings, spec: ModelSpec) -> int:
    """Return how many copies of recurrent states are kept; 0 for a model without any."""
    if not any(isinstance(block.attention, DeltaSpec) for block in spec.blocks):
        return 0
    wanted = settings.batching.snapshots
    return settings.batching.max_sequences + 1 if wanted is None else wanted


def choose_rounding(activations: str, dtype: torch.dtype) -> str:
    """Return how activations are rounded before packed matrices (kernels/cpu/kernel_packing.py); float32 never is."""
    if dtype is torch.float32:
        return "float"
    return {"auto": "wide", "float": "float", "int8": "block"}[activations]


def find_kernels(
    cache_dir: Path, device: torch.device, on_progress: Progress = ignore_progress
) -> tuple[Path | None, str]:
    """Return the library of the C++ kernels, built now if need be, and a note if a CPU has to run without it."""
    if device.type != "cpu":
        return None, ""
    without = "graphcore's kernels are missing: none were built when it was installed, and no C++ compiler works here"
    try:
        library, note = _find_or_build(cache_dir / "kernels", on_progress)
    except GraphError as error:
        return None, f"graphcore's kernels are missing: {error}"
    return library, note if library else without


def _find_or_build(kept: Path, on_progress: Progress) -> tuple[Path | None, str]:
    """Return the library, built in a temporary folder if it cannot be kept or run in `kept`, and a note about that."""
    try:
        library = find_library(kept, on_progress)
    except GraphError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        folder, note = build_folder(kept)
        return find_library(folder, on_progress), note
    if library is None or loads(library):
        return library, ""
    temporary = temporary_folder()  # nothing runs in a folder that is mounted noexec
    copied = None if temporary is None else Path(shutil.copy(library, temporary))
    if copied is None or not loads(copied):
        raise GraphError(f"{library} cannot be loaded; set cache_dir to another folder")
    return copied, ""


def refuse_graph(settings: Settings) -> None:
    """Check, before anything is fetched, that the graph kind that the settings name can run here.

    Raises:
        ConfigError: it cannot run here.
    """
    if settings.graph.kind in ("captured", "compiled"):
        device = resolve_device(settings.device)
        has_kernels = register() if device.type == "cuda" else can_have_kernels()
        choose_graph(settings.graph.kind, device, has_kernels)


def choose_graph(kind: str, device: torch.device, has_kernels: bool) -> tuple[str, str, str]:
    """Return how decode steps run, how everything else runs, and a note if that is slower than what was asked for.

    On the CPU "auto" compiles nothing: a decode step is native programs, and a compiled prefill is at most a quarter
    faster than the same kernels called one by one, while loading the compiler takes seconds.

    Args:
        has_kernels: True where graphcore's own kernels can run: C++ on the CPU, Triton on a GPU.

    Raises:
        ConfigError: the settings name a kind that cannot run here.
    """
    if device.type == "cuda":
        return _choose_gpu_graph(kind, has_kernels)
    if kind == "eager":
        return "eager", "eager", ""
    if kind == "captured" and not has_kernels:
        raise ConfigError(
            f"graph=captured needs a CUDA device, or a C++ compiler (g++ or clang++) for its kernels; this is {device} "
            "and none works here; use graph=eager or graph=auto"
        )
    if kind == "auto" and has_kernels:
        return "captured", "eager", ""
    without = f"graph={kind}: no C++ compiler works here, so"
    if kind == "captured":
        if find_cpp_compiler() is not None:
            return "captured", "compiled", ""
        return "captured", "eager", f"{without} prompts run eager; install g++ for compiled blocks"
    if find_cpp_compiler() is not None:
        return "compiled", "compiled", ""
    if kind == "compiled":
        raise ConfigError("graph=compiled needs a C++ compiler (g++ or clang++), none works here; use graph=eager")
    return "eager", "eager", f"{without} blocks run eager; install g++ for compiled blocks"


def _choose_gpu_graph(kind: str, has_triton: bool) -> tuple[str, str, str]:
    if has_triton:
        chosen = "captured" if kind == "auto" else kind
        return chosen, "eager" if chosen == "eager" else "compiled", ""
    if kind in ("captured", "compiled"):
        raise ConfigError(f"graph={kind} on a GPU needs Triton, which is not installed; install triton, or graph=eager")
    slow = "attention masks the whole cache, and packed weights are unpacked for each use"
    return "eager", "eager", f"Triton is not installed: blocks run eager, {slow}; install triton"


def choose_dependence(setting: str, graph: str, device: torch.device) -> tuple[bool, str]:
    """Return whether a captured step's kernels are launched dependently, and a note if that was asked for in vain.

    Args:
        setting: "auto", "on" or "off".
        graph: how decode steps run.
    """
    can = graph == "captured" and supports_pdl(device)
    if can or setting != "on":
        return can and setting != "off", ""
    capability = ".".join(map(str, FIRST_CAPABILITY))
    return False, (
        f"dependent_launches=on has no effect: it needs graph=captured on a GPU of compute capability {capability} or "
        f"more, and this is graph={graph} on {device}"
    )


def describe_runtime(choices: RuntimeConfig, settings: Settings) -> Sequence[str]:
    """Return the choices in short words, for one line of output."""
    dtype = {value: name for name, value in DTYPES.items()}[choices.dtype]
    graphs = (f"graph={choices.graph}", *([f"prefill={choices.prefill}"] if choices.prefill != choices.graph else []))
    return (str(choices.device), dtype, *graphs, f"streaming={settings.streaming.policy}")
