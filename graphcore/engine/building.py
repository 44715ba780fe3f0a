"""From a plan to what runs: resident weights loaded, slots bound, caches allocated, programs to be built."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphcore.config.settings import Settings
from graphcore.engine.assembly import Assembly, Choices, compile_cache_dir
from graphcore.engine.model import Model
from graphcore.engine.movement import Movement, movement_of
from graphcore.engine.planning import Tier
from graphcore.engine.runner import Runner
from graphcore.engine.token_runner import TokenRunner
from graphcore.engine.weight_stream import WeightStream, open_stream, way_to
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.compile import compile_cache, compiler_loading
from graphcore.graph.step import DecodeKernels
from graphcore.kernels.gpu.registration import register
from graphcore.nn.kv_cache import LayerCache, allocate_cache
from graphcore.progress import Progress
from graphcore.streaming.host_store import HostStore, fill_store
from graphcore.weights.groups import split_layers
from graphcore.weights.matching import EMBEDDING, HEAD
from graphcore.weights.plan import Plan
from graphcore.weights.residents import load_resident


@dataclass(frozen=True)
class Running:
    """What runs programs, and what moves their weights."""

    runner: TokenRunner
    stream: WeightStream


def build_running(
    settings: Settings, model: Model, parts: Assembly, plan: Plan, tier: Tier, on_progress: Progress
) -> Running:
    """Load what stays, open what moves, and return what runs.

    Raises:
        CheckpointError: bytes are wrong, or a file changed.
    """
    choices, decoder, loader = parts.choices, parts.decoder, parts.loader
    layer_groups = split_layers(len(model.spec.blocks), settings.streaming.layer_group_size)
    movement = movement_of(decoder, plan, layer_groups)
    compiled_dir = compile_cache_dir(settings.cache_folder, choices.device)
    with compile_cache(compiled_dir), compiler_loading(is_needed=choices.prefill == "compiled"):
        load_resident(loader, decoder, choices.device, on_progress, movement.moved)
        store = _store(parts, movement) if tier.kind == "host" and plan.is_streaming else None
    builder = _builder(model, parts, layer_groups, movement, compiled_dir, on_progress)
    link_to = way_to(choices.device, settings.streaming.pinned_memory)
    stream = open_stream(loader, decoder, movement, store, tier.is_direct, choices.device, link_to)
    if stream.experts is not None:
        builder.fetcher, builder.slots = stream.experts.cache, stream.experts.slots
        builder.mapped = stream.experts.mapped
    runner = Runner(builder, stream.policy, choices.batch_size, choices.prefill_chunk)
    weakref.finalize(runner, stream.close)  # its threads would keep slots and files of an engine that nobody closed
    return Running(runner, stream)


def _store(parts: Assembly, movement: Movement) -> HostStore:
    """Return the weights that move, in RAM."""
    tables = {HEAD} if movement.heads else set()
    if movement.is_gathered and not (parts.loader.is_tied and tables):
        tables.add(EMBEDDING)
    return fill_store(parts.loader, parts.decoder, movement.groups, [*sorted(tables), *movement.expert_weights])


def _builder(
    model: Model,
    parts: Assembly,
    layer_groups: Sequence[range],
    movement: Movement,
    compiled_dir: Path,
    on_progress: Progress,
) -> GraphBuilder:
    choices = parts.choices
    caches = allocate_cache(model.spec, choices.batch_size, choices.context, choices.kv_dtype, choices.device)
    if movement.plan.is_streaming:
        for cache in caches:  # memory that is only promised would be missing later, under a budget
            cache.k.zero_()
            cache.v.zero_()
    compiled: list[str] = []

    def report(name: str) -> None:
        compiled.append(name)
        on_progress(f"compile {name}", None, len(compiled), 0)

    return GraphBuilder(
        parts.decoder,
        choices.graph,
        layer_groups,
        caches,
        choices.context,
        choices.device,
        report,
        compiled_dir,
        choices.packing.library,
        head_parts=movement.heads,
        streamed=frozenset(movement.plan.streamed),
        compiles=choices.prefill == "compiled",
        decode_kernels=_decode_kernels(choices, caches),
    )


def _decode_kernels(choices: Choices, caches: Sequence[LayerCache]) -> DecodeKernels | None:
    """Return a GPU's own kernels for decode steps, where those are captured and Triton is installed."""
    if choices.device.type != "cuda" or choices.graph != "captured" or not register():
        return None
    from graphcore.graph.device_block import DeviceBlocks  # brings Triton, which a machine without a GPU may lack

    return DeviceBlocks.allocate(caches, choices.device)
