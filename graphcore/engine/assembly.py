"""From a model to a runner: dtype and graph kind chosen, plan made and checked, weights loaded, programs built."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from graphcore.arch.registry import architecture_of
from graphcore.config.settings import Settings
from graphcore.device import DTYPES, cpu_name, find_cpp_compiler, resolve_device, resolve_dtype
from graphcore.engine.model import Model
from graphcore.errors import ConfigError, GraphError
from graphcore.graph.device_obstacle import first_obstacle
from graphcore.graph.native import obstacle_of
from graphcore.kernels.gpu.registration import register
from graphcore.kernels.library import can_have_kernels, find_library
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear
from graphcore.progress import Progress, ignore_progress
from graphcore.quant.choice import STORED
from graphcore.quant.device_packing import DevicePacking
from graphcore.quant.packing import KernelPacking
from graphcore.weights.loader import Loader
from graphcore.weights.matching import match_weights
from graphcore.weights.packed_weights import PackingPolicy, WeightPacker, is_stored_packed
from graphcore.weights.plan import free_nbytes

FREE_SHARE = 0.8  # of free memory that weights may take when they are unpacked at load
DEFAULT_CONTEXT = 4096  # tokens; the whole context of a modern model would take gigabytes of KV cache


@dataclass(frozen=True)
class Choices:
    """What the settings came to on this machine.

    Attributes:
        graph: "captured", "compiled" or "eager", how decode steps run; the CPU captures those of one sequence only.
        prefill: "compiled" or "eager", how everything else runs: prompts, and decode steps that are not captured.
        context: tokens of KV cache for each sequence.
        packing: how packed weights are held and multiplied with.
        notes: one line each: what was left to graphcore, or did not go as one might expect.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    graph: str
    prefill: str
    context: int
    batch_size: int
    prefill_chunk: int
    packing: PackingPolicy
    notes: tuple[str, ...]


def choose(settings: Settings, model: Model, on_progress: Progress = ignore_progress) -> Choices:
    """Return what the settings come to for this model on this machine.

    Args:
        on_progress: told how far kernels are, if they have to be built.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype.name, model.dtype, device)
    library, library_note = find_kernels(settings.cache_folder, device, on_progress)
    on_gpu = device.type == "cuda" and register()
    choices = choices_on(settings, model, device, dtype, library, on_gpu)
    packing = replace(choices.packing, dense_nbytes=room_for_dense(settings, device))
    notes = (*choices.notes, *([library_note] if library_note else []))
    return replace(choices, packing=packing, notes=notes)


def choices_on(
    settings: Settings, model: Model, device: torch.device, dtype: torch.dtype, library: Path | None, on_gpu: bool
) -> Choices:
    """Return what the settings come to on a device, which need not be here.

    Args:
        dtype: of computing.
        library: of the kernels, on a CPU.
        on_gpu: Triton's kernels multiply.

    Raises:
        ConfigError: the device or the model cannot do what was asked.
    """
    has_kernels = library is not None or on_gpu
    graph, prefill, graph_note = choose_graph(settings.graph.kind, device, has_kernels, settings.batch_size)
    context = choose_context(settings, model)
    return Choices(
        device=device,
        dtype=dtype,
        kv_dtype=dtype if settings.kv_dtype == "auto" else DTYPES[settings.kv_dtype],
        graph=graph,
        prefill=prefill,
        context=context,
        batch_size=settings.batch_size,
        prefill_chunk=min(settings.prefill_chunk, context),
        packing=PackingPolicy(
            library, choose_rounding(settings.quant.activations, dtype), settings.quant.format, on_gpu=on_gpu
        ),
        notes=(graph_note,) if graph_note else (),
    )


def room_for_dense(settings: Settings, device: torch.device) -> int:
    """Return the bytes that weights may take when they are unpacked at load; a GPU and streamed weights have none."""
    if device.type != "cpu" or settings.streaming.policy != "off":
        return 0
    return int(FREE_SHARE * free_nbytes(device))


def choose_context(settings: Settings, model: Model) -> int:
    """Return the tokens of KV cache for each sequence.

    Raises:
        ConfigError: more than the model was made for.
    """
    context = settings.context_length or min(model.spec.context, DEFAULT_CONTEXT)
    if context > model.spec.context:
        raise ConfigError(f"context_length={context}, but the model was made for {model.spec.context} tokens")
    return context


def choose_rounding(activations: str, dtype: torch.dtype) -> str:
    """Return how activations are rounded before packed matrices (kernels/packed.py); float32 is never rounded."""
    if dtype is torch.float32:
        return "float"
    return {"auto": "wide", "float": "float", "int8": "block"}[activations]


def find_kernels(
    cache_dir: Path, device: torch.device, on_progress: Progress = ignore_progress
) -> tuple[Path | None, str]:
    """Return the library of the C++ kernels, built ahead or now, and a line where there is none."""
    if device.type != "cpu":
        return None, ""
    try:
        library = find_library(cache_dir / "kernels", on_progress)
    except GraphError as error:
        return None, f"graphcore's kernels are missing: {error}"
    without = "graphcore's kernels are missing: none were built when it was installed, and no C++ compiler works here"
    return library, "" if library else without


def refuse_graph(settings: Settings) -> None:
    """Return if the graph kind that is asked for by name can run here; nothing has to be fetched to know that.

    Raises:
        ConfigError: it cannot.
    """
    if settings.graph.kind in ("captured", "compiled"):
        device = resolve_device(settings.device)
        has_kernels = register() if device.type == "cuda" else can_have_kernels()
        choose_graph(settings.graph.kind, device, has_kernels, settings.batch_size)


def choose_graph(kind: str, device: torch.device, has_kernels: bool, batch_size: int) -> tuple[str, str, str]:
    """Return how decode steps run here, how everything else does, and a line where that is less than was meant.

    On the CPU "auto" compiles nothing for one sequence: its decode step is a native program, and a compiled prefill is
    at most a quarter faster than the same kernels called one by one, after seconds in which the compiler is loaded.

    Args:
        has_kernels: graphcore's own, C++ on the CPU and Triton's on a GPU.

    Raises:
        ConfigError: the kind that was asked for cannot run here.
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
    if kind == "auto" and has_kernels and batch_size == 1:
        return "captured", "eager", ""
    without = f"graph={kind}: no C++ compiler works here, so"
    if kind in ("auto", "captured") and has_kernels:
        if find_cpp_compiler() is not None:
            return "captured", "compiled", ""
        rest = "prompts" if batch_size == 1 else "prompts and batches"
        return "captured", "eager", f"{without} {rest} run eager; install g++ for compiled blocks"
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


@dataclass(frozen=True)
class Assembly:
    """A model's decoder on the meta device, how its weights come, and what the settings came to."""

    choices: Choices
    decoder: Decoder
    loader: Loader


def prepare(
    settings: Settings, model: Model, choices: Choices | None = None, on_progress: Progress = ignore_progress
) -> Assembly:
    """Return what will run, before anything is allocated or read.

    Args:
        choices: made for another machine; None makes them for this one.
        on_progress: told how far kernels are, if they have to be built.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
        CheckpointError: names or shapes are wrong.
    """
    choices = choices or choose(settings, model, on_progress)
    decoder, loader = match_model(model, choices.dtype, choices.packing)
    obstacle = obstacle_of(decoder)
    if choices.graph == "captured" and choices.device.type == "cpu" and obstacle is not None:
        if settings.graph.kind == "captured":
            raise ConfigError(f"graph=captured is not possible: {obstacle}; use graph=auto")
        kind = "eager" if find_cpp_compiler() is None else "compiled"
        notes = (*choices.notes, f"decode runs {kind}: {obstacle}")
        choices = replace(choices, graph=kind, prefill=kind, notes=notes)
    if choices.graph == "captured" and choices.device.type == "cuda":
        choices = replace(choices, notes=(*choices.notes, *notes_on_decode(decoder, choices.batch_size)))
    packed = len({one.name for one in loader.sources.values() if is_stored_packed(loader.checkpoint, one)})
    if packed and choices.device.type == "cpu" and choices.packing.library is None:
        choices = replace(choices, notes=(*choices.notes, note_on_unpacking(decoder)))
    if settings.quant.format != STORED and packed:
        asked = settings.quant.format
        note = f"quant={asked} packs dense weights: the checkpoint's {packed} packed tensors stay as they are"
        choices = replace(choices, notes=(*choices.notes, note))
    if settings.quant.activations == "int8" and not rounds_activations(decoder):
        note = "quant.activations=int8 has no effect: dtype=fp32, or no matrix that the kernels multiply packed"
        choices = replace(choices, notes=(*choices.notes, note))
    return Assembly(choices, decoder, loader)


def notes_on_decode(decoder: Decoder, batch_size: int) -> Sequence[str]:
    """Return a line about decode steps on a GPU that run compiled blocks instead of its own kernels, if any do."""
    obstacle = first_obstacle(decoder, 1) or first_obstacle(decoder, batch_size)
    return () if obstacle is None else (f"decode runs compiled blocks: {obstacle}",)


def note_on_unpacking(decoder: Decoder) -> str:
    """Return a line about packed weights that no kernel multiplies."""
    is_packed = any(isinstance(one, Linear | ExpertLinear) and one.packing is not None for one in decoder.modules())
    if is_packed:
        return "packed weights are unpacked for each use, which is slow; install g++ and start again"
    return "packed weights are unpacked once, at load, and take the memory of dense ones"


def rounds_activations(decoder: Decoder) -> bool:
    """Return whether a matrix of the decoder is multiplied with activations of 8 bits."""
    return any(
        (isinstance(module.packing, KernelPacking) and module.rounding in ("block", "token"))
        or (isinstance(module.packing, DevicePacking) and module.rounding == "token")
        for module in decoder.modules()
        if isinstance(module, Linear | ExpertLinear)
    )


def match_model(model: Model, dtype: torch.dtype, packing: PackingPolicy | None = None) -> tuple[Decoder, Loader]:
    """Return the model's decoder on the meta device and the loader that knows its weights; no weight is read.

    Args:
        packing: how packed weights are held; None unpacks them all.

    Raises:
        CheckpointError: names or shapes are wrong.
    """
    with torch.device("meta"):
        decoder = Decoder(model.spec, dtype)
    shapes = {
        prefix + name: tuple(tensor.shape)
        for prefix, module in decoder.groups()
        for name, tensor in module.named_buffers()
    }
    architecture = architecture_of(model.config)
    sources = match_weights(architecture, model.config, model.checkpoint, shapes, model.stored_layers)
    if packing is not None:
        decoder.use_kernels(packing.library)
        WeightPacker(sources, model.checkpoint, packing).pack(decoder)
    return decoder, Loader(model.checkpoint, sources)


def compile_cache_dir(cache_dir: Path, device: torch.device) -> Path:
    """Return the folder for what is compiled for this machine.

    Inductor's keys hold the graph, its own version and its options; the folder's name adds torch and the processor,
    whose instruction set the compiled code is made for.
    """
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    key = sha256(f"{torch.__version__} {machine} {torch.backends.cpu.get_cpu_capability()}".encode()).hexdigest()[:16]
    return cache_dir / "compiled" / key


def describe_choices(choices: Choices, settings: Settings) -> Sequence[str]:
    """Return the choices as short words for one line of output."""
    dtype = {value: name for name, value in DTYPES.items()}[choices.dtype]
    graphs = (f"graph={choices.graph}", *([f"prefill={choices.prefill}"] if choices.prefill != choices.graph else []))
    return (str(choices.device), dtype, *graphs, f"streaming={settings.streaming.policy}")
