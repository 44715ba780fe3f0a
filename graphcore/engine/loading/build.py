"""Makes a runner from a plan: loads resident weights, binds slots, allocates caches. Programs come at first use."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from graphcore.config.settings import Settings
from graphcore.engine.loading.open_model import Model
from graphcore.engine.loading.prepare_model import PreparedModel
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.compile import code_folder, compile_cache, compiler_loading
from graphcore.graph.step import DecodeKernels
from graphcore.kernels.gpu.registration import register
from graphcore.kvcache.buffers import LayerCache, allocate_cache
from graphcore.nn.spec import ModelSpec
from graphcore.progress import Progress
from graphcore.streaming.weight_stream import WeightStream, stream_weights
from graphcore.weights.plan import Plan, Tier


@dataclass(frozen=True)
class Running:
    """A runner and the stream that moves its weights."""

    runner: ModelRunner
    stream: WeightStream


def build_running(
    settings: Settings, model: Model, parts: PreparedModel, plan: Plan, tier: Tier, on_progress: Progress
) -> Running:
    """Load resident weights, open the stream of the others, and return the runner with that stream.

    Raises:
        CheckpointError: a file has changed, or holds values that are no weights.
    """
    runtime, decoder, loader = parts.runtime, parts.decoder, parts.loader
    compiled_dir, _ = code_folder(settings.cache_folder, runtime.device)
    with compile_cache(compiled_dir), compiler_loading(runtime.device, is_needed=runtime.prefill == "compiled"):
        stream = stream_weights(loader, decoder, plan, settings.streaming, tier, runtime.device, on_progress)
    with ExitStack() as undo:
        undo.callback(stream.close)  # if there is no memory left for the caches
        builder = _builder(model, parts, stream, compiled_dir, on_progress)
        undo.pop_all()
    prompt_tokens = settings.batching.prompt_tokens(runtime.prefill_chunk, plan.is_streaming)
    runner = ProgramRunner(builder, stream.policy, runtime.batch_size, runtime.prefill_chunk, prompt_tokens)
    return Running(runner, stream)


def _builder(
    model: Model,
    parts: PreparedModel,
    stream: WeightStream,
    compiled_dir: Path,
    on_progress: Progress,
) -> GraphBuilder:
    runtime, moving = parts.runtime, stream.moving
    caches = _caches(model.spec, runtime, moving.plan.is_streaming)
    compiled: list[str] = []

    def report(name: str) -> None:
        compiled.append(name)
        on_progress(f"compile {name}", None, len(compiled), 0)

    return GraphBuilder(
        parts.decoder,
        runtime.graph,
        moving.layer_groups,
        caches,
        runtime.context_length,
        runtime.device,
        report,
        compiled_dir,
        runtime.backend,
        head_parts=moving.heads,
        streamed=frozenset(moving.plan.groups.streamed),
        fetched=None if stream.experts is None else stream.experts.fetched,
        compiles=runtime.prefill == "compiled",
        decode_kernels=_decode_kernels(runtime, caches),
        is_dependent=runtime.is_dependent,
    )


def _caches(spec: ModelSpec, runtime: RuntimeConfig, is_streaming: bool) -> tuple[LayerCache, ...]:
    """Return the caches of all layers; memory that a plan has promised is taken now."""
    caches = allocate_cache(spec, runtime.cache_sizes(runtime.context_length), runtime.device)
    if is_streaming:
        for tensor in (tensor for cache in caches for tensor in cache.tensors):
            tensor.zero_()  # the system provides memory at the first write
    return caches


def _decode_kernels(runtime: RuntimeConfig, caches: Sequence[LayerCache]) -> DecodeKernels | None:
    """Return the decode kernels of a GPU; None where decode steps are not captured or Triton is missing."""
    if runtime.device.type != "cuda" or runtime.graph != "captured" or not register():
        return None
    from graphcore.graph.gpu.kernel_decode import DeviceBlocks  # brings Triton, which a machine without a GPU may lack

    return DeviceBlocks.allocate(caches, runtime.device)
