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
from graphcore.kernels.library import build_library
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear
from graphcore.quant.choice import STORED
from graphcore.quant.device_packing import DevicePacking
from graphcore.quant.packing import KernelPacking
from graphcore.weights.loader import Loader
from graphcore.weights.matching import match_weights
from graphcore.weights.packed_weights import PackingPolicy, WeightPacker, is_stored_packed

DEFAULT_CONTEXT = 4096  # tokens; the whole context of a modern model would take gigabytes of KV cache


@dataclass(frozen=True)
class Choices:
    """What the settings came to on this machine.

    Attributes:
        graph: "captured", "compiled" or "eager".
        context: tokens of KV cache for each sequence.
        packing: how packed weights are held and multiplied with.
        notes: one line each: what was left to graphcore, or did not go as one might expect.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    graph: str
    context: int
    batch_size: int
    prefill_chunk: int
    packing: PackingPolicy
    notes: tuple[str, ...]


def choose(settings: Settings, model: Model) -> Choices:
    """Return what the settings come to for this model on this machine.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype.name, model.dtype, device)
    library, library_note = find_kernels(Path(settings.cache_dir).expanduser(), device)
    on_gpu = device.type == "cuda" and register()
    graph, graph_note = choose_graph(settings.graph.kind, device, library is not None or on_gpu)
    context = settings.context_length or min(model.spec.context, DEFAULT_CONTEXT)
    if context > model.spec.context:
        raise ConfigError(f"context_length={context}, but the model was made for {model.spec.context} tokens")
    return Choices(
        device=device,
        dtype=dtype,
        kv_dtype=dtype if settings.kv_dtype == "auto" else DTYPES[settings.kv_dtype],
        graph=graph,
        context=context,
        batch_size=settings.batch_size,
        prefill_chunk=min(settings.prefill_chunk, context),
        packing=PackingPolicy(
            library,
            choose_rounding(settings.quant.activations, dtype),
            settings.quant.format,
            on_gpu=on_gpu,
        ),
        notes=tuple(note for note in (graph_note, library_note) if note),
    )


def choose_rounding(activations: str, dtype: torch.dtype) -> str:
    """Return how activations are rounded before packed matrices (kernels/packed.py); float32 is never rounded."""
    if dtype is torch.float32:
        return "float"
    return {"auto": "wide", "float": "float", "int8": "block"}[activations]


def find_kernels(cache_dir: Path, device: torch.device) -> tuple[Path | None, str]:
    """Return the library of the C++ kernels, built now if need be, and a line about it where there is none."""
    if device.type != "cpu":
        return None, ""
    try:
        library = build_library(cache_dir / "kernels")
    except GraphError as error:
        return None, f"packed weights are unpacked for each use: {error}"
    without = "no C++ compiler works here: packed weights are unpacked for each use, which is slow; install g++"
    return library, "" if library else without


def choose_graph(kind: str, device: torch.device, has_kernels: bool) -> tuple[str, str]:
    """Return the graph kind that runs here, and a line about it where "auto" did not get the best.

    Args:
        has_kernels: graphcore's own, C++ on the CPU and Triton's on a GPU.

    Raises:
        ConfigError: the kind that was asked for cannot run here.
    """
    if device.type == "cuda":
        return _choose_gpu_graph(kind, has_kernels)
    if kind == "eager":
        return kind, ""
    if kind == "captured" and not has_kernels:
        raise ConfigError(
            f"graph=captured needs a CUDA device, or a C++ compiler (g++ or clang++) for its kernels; this is {device} "
            "and none works here; use graph=eager or graph=auto"
        )
    if kind in ("auto", "captured") and has_kernels:
        return "captured", ""
    if find_cpp_compiler() is not None:
        return "compiled", ""
    if kind == "compiled":
        raise ConfigError("graph=compiled needs a C++ compiler (g++ or clang++), none works here; use graph=eager")
    return "eager", "graph=auto: no C++ compiler works here, so blocks run eager; install g++ for compiled blocks"


def _choose_gpu_graph(kind: str, has_triton: bool) -> tuple[str, str]:
    if has_triton:
        return ("captured" if kind == "auto" else kind), ""
    if kind in ("captured", "compiled"):
        raise ConfigError(f"graph={kind} on a GPU needs Triton, which is not installed; install triton, or graph=eager")
    slow = "attention masks the whole cache, and packed weights are unpacked for each use"
    return "eager", f"Triton is not installed: blocks run eager, {slow}; install triton"


@dataclass(frozen=True)
class Assembly:
    """A model's decoder on the meta device, how its weights come, and what the settings came to."""

    choices: Choices
    decoder: Decoder
    loader: Loader


def prepare(settings: Settings, model: Model) -> Assembly:
    """Return what will run, before anything is allocated or read.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
        CheckpointError: names or shapes are wrong.
    """
    choices = choose(settings, model)
    decoder, loader = match_model(model, choices.dtype, choices.packing)
    obstacle = obstacle_of(decoder)
    if choices.graph == "captured" and choices.device.type == "cpu" and obstacle is not None:
        if settings.graph.kind == "captured":
            raise ConfigError(f"graph=captured is not possible: {obstacle}; use graph=auto")
        choices = replace(choices, graph="compiled", notes=(*choices.notes, f"decode runs compiled: {obstacle}"))
    if choices.graph == "captured" and choices.device.type == "cuda":
        choices = replace(choices, notes=(*choices.notes, *notes_on_decode(decoder, choices.batch_size)))
    packed = len({one.name for one in loader.sources.values() if is_stored_packed(loader.checkpoint, one)})
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
    return (str(choices.device), dtype, f"graph={choices.graph}", f"streaming={settings.streaming.policy}")
