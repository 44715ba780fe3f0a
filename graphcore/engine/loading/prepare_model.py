"""From an opened model to one that can be planned: its decoder on the meta device, and a loader that knows its weights.

No weight is allocated or read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphcore.arch.registry import architecture_of
from graphcore.arch.weight_map import weight_shapes
from graphcore.config.settings import Settings
from graphcore.device import find_cpp_compiler
from graphcore.engine.loading.open_model import Model
from graphcore.engine.loading.runtime_config import RuntimeConfig, runtime_config_here
from graphcore.errors import ConfigError
from graphcore.graph.cpu.native_decode import native_obstacle
from graphcore.graph.gpu.kernel_obstacles import device_obstacle
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear
from graphcore.progress import Progress, ignore_progress
from graphcore.quant.format_choice import STORED
from graphcore.weights.extra_tensors import notes_on_unused
from graphcore.weights.loader import Loader
from graphcore.weights.matching import match_weights
from graphcore.weights.packed_weights import PackingPolicy, WeightPacker, is_stored_packed


@dataclass(frozen=True)
class PreparedModel:
    """A model's choices, its decoder on the meta device, and the loader of its weights."""

    choices: RuntimeConfig
    decoder: Decoder
    loader: Loader


def prepare_model(
    settings: Settings, model: Model, choices: RuntimeConfig | None = None, on_progress: Progress = ignore_progress
) -> PreparedModel:
    """Return the model's choices, decoder and loader; no weight is allocated or read.

    Args:
        choices: choices for another machine; None makes them for this one.
        on_progress: callback while kernels are built.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
        CheckpointError: names or shapes are wrong.
    """
    choices = choices or runtime_config_here(settings, model, on_progress)
    decoder, loader = match_model(model, choices.dtype, choices.packing)
    used = {source.name for source in loader.sources.values()}
    unused = notes_on_unused(architecture_of(model.config), model.config, model.checkpoint, used, model.stored_layers)
    choices = replace(choices, notes=(*choices.notes, *unused))
    is_native = choices.graph == "captured" and choices.device.type == "cpu"
    if is_native and (obstacle := native_obstacle(decoder)) is not None:
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
    return PreparedModel(choices, decoder, loader)


def notes_on_decode(decoder: Decoder, batch_size: int) -> Sequence[str]:
    """Return a note if decode steps on a GPU run compiled blocks in place of decode kernels."""
    obstacle = device_obstacle(decoder, 1) or device_obstacle(decoder, batch_size)
    return () if obstacle is None else (f"decode runs compiled blocks: {obstacle}",)


def note_on_unpacking(decoder: Decoder) -> str:
    """Return a note about packed weights that no kernel multiplies: unpacked at load or for each use."""
    is_packed = any(isinstance(one, Linear | ExpertLinear) and one.packing is not None for one in decoder.modules())
    if is_packed:
        return "packed weights are unpacked for each use, which is slow; install g++ and start again"
    return "packed weights are unpacked once, at load, and take the memory of dense ones"


def rounds_activations(decoder: Decoder) -> bool:
    """Return whether any matrix of the decoder is multiplied with activations rounded to 8 bits."""
    return any(
        (isinstance(module.packing, KernelPacking) and module.rounding in ("block", "token"))
        or (isinstance(module.packing, DevicePacking) and module.rounding == "token")
        for module in decoder.modules()
        if isinstance(module, Linear | ExpertLinear)
    )


def match_model(model: Model, dtype: torch.dtype, packing: PackingPolicy | None = None) -> tuple[Decoder, Loader]:
    """Return the model's decoder on the meta device and the loader that knows its weights; no weight is read.

    Args:
        packing: policy of how packed weights are held; None unpacks them all.

    Raises:
        CheckpointError: names or shapes are wrong.
    """
    with torch.device("meta"):
        decoder = Decoder(model.spec, dtype)
    architecture = architecture_of(model.config)
    shapes = weight_shapes(decoder)
    sources = match_weights(architecture, model.config, model.checkpoint, shapes, model.stored_layers)
    if packing is not None:
        decoder.use_kernels(packing.library)
        WeightPacker(sources, model.checkpoint, packing).pack(decoder)
    return decoder, Loader(model.checkpoint, sources)
