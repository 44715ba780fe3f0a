"""Prepares an opened model for planning: a decoder on the meta device, and a loader that locates its weights.

No weight is allocated or read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from graphcore.arch.config.rope_parameters import advice_on_context, note_on_longrope
from graphcore.arch.registry import architecture_of
from graphcore.arch.weight_map import weight_shapes
from graphcore.checkpoint.quantized.layout import ORDER_ADVICE
from graphcore.config.settings import DRAFT_FORMAT, Settings
from graphcore.config.user_path import lacks_home
from graphcore.device import find_cpp_compiler
from graphcore.engine.loading.kv_dtype import choose_kv_types, note_on_kv_types
from graphcore.engine.loading.open_model import Model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.engine.loading.runtime_config import (
    NO_HOME,
    ComputeTarget,
    RuntimeConfig,
    choose_blocks,
    choose_context_length,
    choose_graph,
    choose_pdl,
    choose_snapshots,
    choose_speculation,
    packing_policy_of,
    target_here,
)
from graphcore.errors import ConfigError, UnsupportedError
from graphcore.graph.artefacts import model_facts
from graphcore.graph.compile import code_folder
from graphcore.graph.cpu.native_decode import native_obstacle
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear, StackedLinear
from graphcore.progress import Progress, ignore_progress
from graphcore.quant.format_choice import STORED
from graphcore.weights.adapted_checkpoint import AdaptedCheckpoint, with_adapters
from graphcore.weights.adapters import notes_on_unused_pairs, place_pairs
from graphcore.weights.draft_copy import DraftCopy
from graphcore.weights.extra_tensors import notes_on_unused
from graphcore.weights.loader import Loader
from graphcore.weights.matching import match_weights, ordered_inputs
from graphcore.weights.packed_weights import PackingPolicy, WeightPacker, is_stored_packed


def prepare_model(
    settings: Settings,
    model: Model,
    target: ComputeTarget | None = None,
    on_progress: Progress = ignore_progress,
    source_note: str = "",
) -> PreparedDecoder:
    """Return the model's runtime configuration, decoder and loader; no weight is allocated or read.

    Args:
        target: the device on another machine; None is the one that the settings name on this machine.
        on_progress: callback while kernels are built.
        source_note: note about the checkpoint's source, which follows those about the device.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
        CheckpointError: names or shapes are wrong.
    """
    target = target or target_here(settings, model, on_progress)
    has_kernels, has_artefacts, asked = target.backend.has_kernels, target.artefacts is not None, settings.graph
    graph, prefill, graph_note = choose_graph(
        asked.kind, target.device, has_kernels, asked.blocks, asked.prefill, has_artefacts
    )
    context_length = choose_context_length(settings, model.spec.context, advice_on_context(model.config.rope))
    kv_dtype = choose_kv_types(settings.kv_dtype, model, target.dtype, target.device)
    packing = packing_policy_of(settings, target)
    uses_pdl, notes = False, [*model.config.notes, *note_on_longrope(model.config.rope, context_length)]
    if target.is_here:
        uses_pdl, pdl_note = choose_pdl(settings.dependent_launches, graph, target.device)
        chosen = graph_note, *note_on_kv_types(kv_dtype, model), *notes_on_building(settings, target, prefill)
        notes += filter(None, (*chosen, pdl_note))
    decoder, loader = match_model(model, target.dtype, packing)
    if target.artefacts is not None:
        target.artefacts.check_facts(model_facts(decoder, packing.rounding, target.dtype, kv_dtype))
    graph, prefill, decode_note = as_recorded(settings, target.device, decoder, graph, prefill)
    batch_size = settings.batching.max_sequences
    blocks, block_notes = choose_blocks(asked.blocks, graph, target.device, decoder, batch_size)
    speculation, draft_tokens, note = choose_speculation(settings, target.device, graph)
    notes += filter(None, (source_note, *notes_on_unread(model, loader), decode_note, note))
    how = target.device, target.dtype, kv_dtype, graph, blocks, prefill, context_length
    runtime = RuntimeConfig(
        *how,
        cache_tokens=settings.batching.cache_tokens,
        snapshots=choose_snapshots(settings, model.spec),
        speculation=speculation,
        draft_tokens=draft_tokens,
        draft_format=settings.speculation.draft_format or DRAFT_FORMAT,
        batch_size=batch_size,
        prefill_chunk=min(settings.prefill_chunk, context_length),
        packing=packing,
        uses_pdl=uses_pdl,
        is_batch_invariant=prefill == "eager" and target.device.type == "cpu" and decoder.is_batch_invariant,
        artefacts=target.artefacts,
    )
    notes += (*block_notes, *notes_on_kernels(settings, runtime, decoder, loader))
    return PreparedDecoder(runtime, notes, loader, decoder, draft_of(runtime, decoder, loader))


def draft_of(runtime: RuntimeConfig, decoder: Decoder, loader: Loader) -> DraftCopy | None:
    """Return the draft model for speculation=self, its weights not yet loaded; None for other kinds.

    Raises:
        ConfigError: no native program can run it.
    """
    if runtime.speculation != "self":
        return None
    draft = DraftCopy.of(decoder, loader, replace(runtime.packing, format=runtime.draft_format))
    if (obstacle := native_obstacle(draft.decoder)) is not None:
        raise ConfigError(
            f"speculation=self is not possible with speculation.draft_format={runtime.draft_format}: {obstacle}; set "
            "another format, or speculation=off"
        )
    return draft


def as_recorded(
    settings: Settings, device: torch.device, decoder: Decoder, graph: str, prefill: str
) -> tuple[str, str, str]:
    """Return how decode steps and all else run, and a note, for a decoder that a CPU may not be able to record.

    If it cannot, both are "compiled", or "eager" without a compiler.

    Raises:
        ConfigError: the settings ask for captured steps.
    """
    obstacle = native_obstacle(decoder) if graph == "captured" and device.type == "cpu" else None
    if obstacle is None:
        return graph, prefill, ""
    if settings.graph.kind == "captured":
        raise ConfigError(f"graph=captured is not possible: {obstacle}; use graph=auto")
    if settings.graph.blocks == "kernels":
        raise ConfigError(f"graph.blocks=kernels is not possible: {obstacle}; use graph.blocks=auto")
    runs = "eager" if find_cpp_compiler() is None else "compiled"
    if settings.graph.prefill not in ("auto", runs):
        raise ConfigError(f"graph.prefill={settings.graph.prefill} is not possible: {obstacle}; use graph={runs}")
    return runs, runs, f"decode runs {runs}: {obstacle}"


def notes_on_building(settings: Settings, target: ComputeTarget, prefill: str) -> Sequence[str]:
    """Return notes about where code is built and kept; empty ones where there is nothing to say."""
    home_note = NO_HOME if lacks_home(settings.cache_dir) else ""
    code_note = code_folder(settings.cache_folder, target.device)[1] if prefill != "eager" else ""
    return home_note, target.note, code_note


def notes_on_unread(model: Model, loader: Loader) -> Sequence[str]:
    """Return notes about tensors of the checkpoint that no weight is made of, and about adapters."""
    used = {source.name for source in (loader.beneath or loader).sources.values()}
    adapters = [loader.checkpoint.note] if isinstance(loader.checkpoint, AdaptedCheckpoint) else []
    architecture, config = architecture_of(model.config), model.config
    unused = notes_on_unused(architecture, config, model.checkpoint, used, model.stored_layers)
    unused_pairs = notes_on_unused_pairs(architecture, config, model.adapters, model.stored_layers)
    return (*unused, *filter(None, adapters), *unused_pairs)


def notes_on_kernels(settings: Settings, runtime: RuntimeConfig, decoder: Decoder, loader: Loader) -> Iterator[str]:
    """Yield notes on what no kernel computes, and on settings of packed weights that have no effect."""
    packed = len({one.name for one in loader.sources.values() if is_stored_packed(loader.checkpoint, one)})
    if packed and runtime.device.type == "cpu" and not runtime.backend.has_kernels:
        yield note_on_unpacking(decoder)
    if settings.quant.format != STORED and packed:
        asked = settings.quant.format
        model = settings.model
        has_full = model.precision == "q4" and "full" in model.files and model.checkpoint == model.published.checkpoint
        instead = "; model.precision=full is the author's own checkpoint" if has_full else ""
        yield f"quant={asked} packs dense weights: the checkpoint's {packed} packed tensors stay as they are{instead}"
    if settings.quant.activations == "int8" and not rounds_activations(decoder):
        yield "quant.activations=int8 has no effect: dtype=fp32, or no matrix that the kernels multiply packed"


def note_on_unpacking(decoder: Decoder) -> str:
    """Return a note about packed weights that no kernel multiplies: unpacked at load or for each use."""
    is_packed = any(isinstance(one, Linear | StackedLinear) and one.packing is not None for one in decoder.modules())
    if is_packed:
        return "packed weights are unpacked for each use, which is slow; install g++ and start again"
    return "packed weights are unpacked once, at load, and take the memory of dense ones"


def rounds_activations(decoder: Decoder) -> bool:
    """Return whether any matrix of the decoder is multiplied with activations rounded to 8 bits."""
    return any(
        (isinstance(module.packing, KernelPacking) and module.rounding in ("block", "token"))
        or (isinstance(module.packing, DevicePacking) and module.rounding == "token")
        for module in decoder.modules()
        if isinstance(module, Linear | StackedLinear)
    )


def decoder_of(model: Model, dtype: torch.dtype) -> Decoder:
    """Return the model's decoder on the meta device, with input orders where the checkpoint has them.

    Raises:
        UnsupportedError: the checkpoint has an order for a weight that is no projection of a block.
    """
    with torch.device("meta"):
        decoder = Decoder(model.spec, dtype)
    names = ordered_inputs(architecture_of(model.config), model.config, model.checkpoint, weight_shapes(decoder))
    if not names:
        return decoder
    for name in names:
        if not (name.startswith("layers.") and isinstance(decoder.get_submodule(name), Linear)):
            raise UnsupportedError(
                f"{model.checkpoint.source}: the columns of {name} have an order (act-order), which is supported "
                f"only for projections of layers; {ORDER_ADVICE}"
            )
    with torch.device("meta"):
        return Decoder(model.spec.with_ordered_inputs(names), dtype)


def match_model(model: Model, dtype: torch.dtype, packing: PackingPolicy | None = None) -> tuple[Decoder, Loader]:
    """Return the model's decoder on the meta device and the loader that locates its weights; no weight is read.

    Args:
        packing: policy of how packed weights are held; None unpacks them all.

    Raises:
        CheckpointError: names or shapes are wrong, of the model or of an adapter.
    """
    architecture = architecture_of(model.config)
    decoder = decoder_of(model, dtype)
    shapes = weight_shapes(decoder)
    sources = match_weights(architecture, model.config, model.checkpoint, shapes, model.stored_layers)
    if packing is not None:
        decoder.use_backend(packing.backend)
        WeightPacker(sources, model.checkpoint, packing).pack(decoder)
    loader = Loader(model.checkpoint, sources)
    if not model.adapters:
        return decoder, loader
    placed = place_pairs(architecture, model.config, decoder, model.adapters, model.stored_layers)
    return decoder, with_adapters(loader, decoder, placed)
