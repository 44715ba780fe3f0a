"""The loader of graphcore's own architectures: a decoder whose weights lie where the plan says, and its runner."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch

from graphcore.config.settings import Settings
from graphcore.engine.loading.decoder_share import check_partitionable, with_share
from graphcore.engine.loading.layer_shares import capacity_of, check_ends, share_layers
from graphcore.engine.loading.model_loader import ModelLoader, Running
from graphcore.engine.loading.open_model import Model, open_model
from graphcore.engine.loading.plan_run import no_room_for, plan_run, plan_shorter
from graphcore.engine.loading.plan_speculation import plan_with_speculation, without_model
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.engine.loading.runtime_config import RuntimeConfig, note_on_chunks
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.programs import Programs
from graphcore.engine.ring.lead_runner import LeadRunner
from graphcore.engine.ring.shared_headers import headers_elsewhere
from graphcore.graph.artefacts import CachedPackages
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.compile import JustInTime, code_folder, compile_cache, compiler_loading
from graphcore.graph.hand_over import HandOver
from graphcore.graph.step import DecodeKernels
from graphcore.host_pages import is_of_file
from graphcore.kernels.gpu.registration import register
from graphcore.kvcache.buffers import LayerCache, allocate_cache
from graphcore.nn.decoder import Decoder
from graphcore.parallel.capacity import RankCapacity
from graphcore.parallel.process_group import ProcessGroup
from graphcore.parallel.share import Share
from graphcore.planning.machine import Machine, Speeds
from graphcore.planning.prediction import Rates
from graphcore.planning.rates import measure_rates
from graphcore.progress import Progress
from graphcore.streaming.moving_weights import MovingWeights, find_moving
from graphcore.streaming.weight_stream import WeightStream, stream_weights
from graphcore.weights.plan import Plan, Tier
from graphcore.weights.resident_weights import load_resident


class DecoderLoader(ModelLoader[Model, PreparedDecoder]):
    """Models of graphcore's own architectures, which its own programs run. Programs are built at first use.

    Args:
        ranks: process group whose ranks share the layers; None if this process has all.
        is_interleaved: True to interleave the layers of ranks; False for neighbouring layers on each.
    """

    def __init__(self, ranks: ProcessGroup | None = None, is_interleaved: bool = False) -> None:
        self._ranks, self._is_interleaved = ranks, is_interleaved

    def open(self, settings: Settings, on_progress: Progress) -> Model:
        """Return the model that the settings name, downloaded if need be; no weight is read."""
        elsewhere = {} if self._ranks is None else headers_elsewhere(settings, self._ranks)
        return open_model(settings.model, settings.seed, settings.cache_folder, on_progress, elsewhere)

    def prepare(self, settings: Settings, model: Model, on_progress: Progress) -> PreparedDecoder:
        """Return the model's decoder on the meta device, for this machine; kernels are built if they are missing."""
        parts = prepare_model(settings, model, on_progress=on_progress)
        if self._ranks is None:
            return parts
        check_partitionable(parts)
        if self._ranks.is_lead:
            check_ends(parts.loader)
        machine, is_one_machine = self._machine(parts), self._ranks.launch.is_one_machine
        capacity = capacity_of(settings, parts, machine, Speeds(), self._is_interleaved, is_one_machine)
        capacities = [RankCapacity(**told) for told in self._ranks.all_say(asdict(capacity))]
        owners = share_layers(settings, parts, capacities, self._is_interleaved)
        self._ranks.connect(owners)  # before memory is planned, of which communicators take some
        return with_share(parts, Share(self._ranks.rank, owners, tuple(capacities)))

    def plan(
        self, settings: Settings, parts: PreparedDecoder, on_progress: Progress
    ) -> tuple[PreparedDecoder, Plan, Tier]:
        """Return the parts as the plan has them, the plan for this machine, and the tier of streamed weights.

        With speculation=auto the rates of this machine may be measured, within a second or two.

        Raises:
            PlanError: the model does not fit; the message has the smallest budget that works.
            ConfigError: streaming.source names a tier that the weights cannot be read from.
        """

        if self._ranks is not None:
            machine = self._machine(parts)
            planned = plan_run(settings, parts, machine)
            return plan_shorter(settings, planned, min(self._ranks.all_say(planned[1].context_length)), machine)

        def measure(parts: PreparedDecoder, plan: Plan, tier: Tier) -> Rates | None:
            on_progress("measure", None, 0, 0)
            moving = find_moving(parts.decoder, plan, parts.layer_groups(settings.streaming))
            here = Machine.here(parts.runtime.device)
            backend, folder = parts.runtime.backend, settings.swap_folder
            return measure_rates(parts.loader, moving, tier, here, Speeds(), backend, folder=folder)

        return plan_with_speculation(settings, parts, measure)

    def agree(
        self, settings: Settings, parts: PreparedDecoder, plan: Plan, tier: Tier
    ) -> tuple[PreparedDecoder, Plan, Tier]:
        """Return the parts with what all ranks must do alike: the chunks of prompts, and the kind of speculation.

        There is no draft model if no rank has copies of weights for it.
        """
        own = [plan.is_streaming, plan.draft_nbytes > 0, plan.experts is not None, parts.runtime.is_batch_invariant]
        said = [own] if self._ranks is None else self._ranks.all_say(own)
        streams, has_copies, has_experts, are_invariant = zip(*said, strict=True)
        runtime = replace(parts.runtime, prompts_together=all(streams), is_batch_invariant=all(are_invariant))
        parts = replace(parts, runtime=runtime)
        parts.notes.extend(note_on_chunks(runtime, parts.decoder.spec))
        if self._ranks is None or parts.runtime.speculation == "off":
            return parts, plan, tier
        if parts.draft is not None and not any(has_copies):
            parts.notes.append(parts.note_without_copies())
            parts = replace(parts, draft=None)
        if settings.speculation.kind == "auto":
            return without_model(settings, (parts, plan, tier), any(has_experts), self._machine(parts))
        return parts, plan, tier

    def _machine(self, parts: PreparedDecoder) -> Machine:
        """Return this machine, or this rank's part of it."""
        here = Machine.here(parts.runtime.device)
        return here if self._ranks is None else here.shared(self._ranks.launch.local_world_size, self._ranks.sharers)

    @torch.inference_mode()
    def build(
        self, settings: Settings, parts: PreparedDecoder, plan: Plan, tier: Tier, on_progress: Progress
    ) -> Running:
        """Load resident weights, bind slots for the others, allocate caches, and return the runner and the stream."""
        runtime, decoder, loader, streaming = parts.runtime, parts.decoder, parts.loader, settings.streaming
        compiled_dir, _ = code_folder(settings.cache_folder, runtime.device)
        needs_compiler = runtime.prefill != "eager" and runtime.device.type == "cuda"
        with compile_cache(compiled_dir), compiler_loading(runtime.device, needs_compiler):
            moving = find_moving(decoder, plan, parts.layer_groups(streaming))
            load_resident(loader, decoder, runtime.device, on_progress, moving.names)
            draft = self._draft(parts, moving, on_progress)
            stream = stream_weights(loader, moving, tier, runtime.device, streaming.pinned_memory, decoder)
        with ExitStack() as undo:
            undo.callback(stream.close)  # if there is no memory left for the caches, or compiled blocks do not fit
            builder = _builder(settings, parts, stream, compiled_dir, on_progress, self._ranks)
            if runtime.artefacts is not None:
                Programs(builder, runtime.batch_size).build_all()
            undo.pop_all()
        prompt_tokens = settings.batching.prompt_tokens(runtime.prefill_chunk, runtime.prompts_together)
        sizes = runtime.batch_size, runtime.chunks, prompt_tokens, runtime.draft_tokens
        drafting = None if draft is None else builder.with_decoder(draft)
        is_lead = self._ranks is not None and self._ranks.is_lead
        runner = (LeadRunner if is_lead else ProgramRunner)(builder, stream.policy, *sizes, drafting, plan.spare_nbytes)
        return Running(runner, stream)

    def _draft(self, parts: PreparedDecoder, moving: MovingWeights, on_progress: Progress) -> Decoder | None:
        """Return the loaded draft model, None without one; on a ring, a rank without copies drafts with its weights."""
        has_copies = moving.plan.draft_nbytes > 0
        if parts.draft is None or (self._ranks is None and not has_copies):
            return None
        draft = parts.draft if has_copies else replace(parts.draft, smaller=frozenset())
        streamed = {weight.name for group in moving.groups for weight in group.weights}
        return draft.load(parts.loader, streamed, on_progress)


def _builder(
    settings: Settings,
    parts: PreparedDecoder,
    stream: WeightStream,
    compiled_dir: Path,
    on_progress: Progress,
    ranks: ProcessGroup | None,
) -> GraphBuilder:
    runtime, moving = parts.runtime, stream.moving
    caches = _caches(settings, parts, moving.plan)
    compiled: list[str] = []

    def report(name: str) -> None:
        compiled.append(name)
        on_progress(f"compile {name}", None, len(compiled), 0)

    compiler = JustInTime if runtime.device.type == "cuda" else CachedPackages
    return GraphBuilder(
        parts.decoder,
        runtime.graph,
        moving.layer_groups,
        caches,
        runtime.context_length,
        runtime.device,
        compiled_dir,
        runtime.backend,
        head_parts=moving.heads,
        streamed=frozenset(moving.plan.groups.streamed),
        fetched=None if stream.experts is None else stream.experts.fetched,
        compiles=runtime.prefill != "eager",
        decode_kernels=None if settings.graph.blocks == "compiled" else _decode_kernels(runtime, caches),
        uses_pdl=runtime.uses_pdl,
        captured_chunk=runtime.prefill_chunk if runtime.prefill == "captured" else 0,
        make=runtime.artefacts or compiler(compiled_dir, report),
        hand_over=None if ranks is None or runtime.share is None else HandOver(runtime.share, ranks),
    )


def _caches(settings: Settings, parts: PreparedDecoder, plan: Plan) -> tuple[LayerCache, ...]:
    """Return the caches of all layers; where weights stream, all the memory that the plan has promised is taken now.

    Raises:
        PlanError: the disk has no room for the caches that are offloaded.
    """
    runtime, folder, offloaded = parts.runtime, settings.swap_folder, plan.offloaded_kv
    sizes = runtime.cache_sizes(runtime.context_length)
    layers = () if offloaded is None else offloaded.layers
    try:
        caches = allocate_cache(parts.decoder.spec, sizes, runtime.device, layers, folder)
    except OSError as error:
        assert offloaded is not None, "only files have no room"
        raise no_room_for(offloaded, folder, error.strerror or str(error)) from error
    if plan.is_streaming:
        for tensor in (tensor for cache in caches for tensor in cache.tensors if not is_of_file(tensor)):
            tensor.zero_()  # the system provides memory at the first write
    return caches


def _decode_kernels(runtime: RuntimeConfig, caches: Sequence[LayerCache]) -> DecodeKernels | None:
    """Return the decode kernels of a GPU; None where decode steps are not captured or Triton is missing."""
    if runtime.device.type != "cuda" or runtime.graph != "captured" or not register():
        return None
    from graphcore.graph.gpu.kernel_decode import DeviceBlocks  # brings Triton, which a machine without a GPU may lack

    return DeviceBlocks.allocate(caches, runtime.device)
