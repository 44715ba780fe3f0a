"""From a checkpoint to a transformers model that an engine can run: model.fallback=transformers.

source -> local folder -> SafetensorsCheckpoint -> transformers config -> Skeleton -> Loader -> groups -> runner
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphcore.arch.checkpoint_config import stored_dtype
from graphcore.arch.config.model_config import ModelConfig
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.sources.fetch import fetch
from graphcore.checkpoint.sources.source import RandomSource, parse_source
from graphcore.config.settings import Settings
from graphcore.device import DTYPES, resolve_device, resolve_dtype
from graphcore.engine.fallback.config import check_sizes, model_config_of, read_transformers_config, why_whole
from graphcore.engine.fallback.runner import TransformersRunner
from graphcore.engine.fallback.skeleton import build_skeleton
from graphcore.engine.fallback.stored_names import match_skeleton, notes_on_left_out
from graphcore.engine.fallback.weight_groups import SkeletonWeights
from graphcore.engine.fallback.weights_in_place import load_resident_skeleton, moved_names, open_transformers_stream
from graphcore.engine.loading.build import Running
from graphcore.engine.loading.open_model import read_tokenizer
from graphcore.engine.loading.plan_run import at_plan, plan_request_of
from graphcore.engine.loading.runtime_config import RuntimeConfig, choose_context_length
from graphcore.errors import ConfigError, UnsupportedError
from graphcore.kernels.backend import TorchBackend
from graphcore.kernels.ops.kv_formats import kv_types
from graphcore.planning.costs import LIBRARIES, making_nbytes
from graphcore.planning.machine import Machine
from graphcore.planning.planner import Costs, plan_streaming
from graphcore.planning.tier import buffer_nbytes, check_host, choose_tier, ram_nbytes
from graphcore.progress import Progress
from graphcore.quant.format_choice import STORED
from graphcore.tokenizer.tokenizer import Tokenizer
from graphcore.weights.loader import Loader
from graphcore.weights.packed_weights import PackingPolicy
from graphcore.weights.plan import Plan, Tier

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WITHOUT = "model.fallback=transformers"


@dataclass(frozen=True)
class TransformersModel:
    """A checkpoint of a model that one of transformers' classes runs.

    Attributes:
        config: sizes and token ids that any model has; all else stays in the class's own config.
        tokenizer: the tokenizer; None if the checkpoint has none.
        unread: reason why the checkpoint's tokenizer is not read; empty if it is, or if there is none.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer | None
    unread: str


@dataclass(frozen=True)
class TransformersParts:
    """A transformers model before any weight is allocated or read.

    Attributes:
        notes: lines about what graphcore chose or what may surprise.
        loader: loader of the weights.
        weights: the skeleton's weights, sorted by how they can move.
        longest: most tokens that the model was trained for.
    """

    runtime: RuntimeConfig
    notes: Sequence[str]
    loader: Loader
    weights: SkeletonWeights
    longest: int


def open_transformers(
    settings: Settings, on_progress: Progress
) -> tuple[TransformersModel, TransformersParts, Plan, Tier]:
    """Return the model that the settings name, downloaded if need be, its parts, plan and tier; no weight is read.

    Raises:
        ConfigError: a setting has no effect here, or the model or machine cannot do what was asked.
        CheckpointError: there is no checkpoint, it is damaged, or names or shapes are wrong.
        UnsupportedError: transformers has no such model, or its layers, buffers or weights are not of a supported form.
        PlanError: the model does not fit on the device or in RAM.
    """
    check_settings(settings)
    cache_dir = settings.cache_folder
    source = parse_source(settings.model.checkpoint)
    if isinstance(source, RandomSource):
        raise ConfigError(f"{WITHOUT} needs a checkpoint, and random: makes weights of graphcore's own models only")
    checkpoint = open_checkpoint(fetch(source, cache_dir, settings.model.expected_sha256, on_progress))
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        raise UnsupportedError(f"{checkpoint.source}: {WITHOUT} reads Hugging Face folders with safetensors, not GGUF")
    config = read_transformers_config(checkpoint.folder)
    model = TransformersModel(
        checkpoint, model_config_of(config, checkpoint.folder), *read_tokenizer(checkpoint, cache_dir)
    )
    check_sizes(model.config, checkpoint)
    notes = [*model.config.notes, f"{model.config.model_type} runs through transformers' own classes, eager"]
    runtime = fallback_runtime(settings, model, config, notes)
    skeleton = build_skeleton(config, settings.model.attention, runtime.dtype, checkpoint.source)
    loader = match_skeleton(skeleton, checkpoint)
    notes += notes_on_left_out(loader)
    weights = SkeletonWeights.of(skeleton, loader, settings.streaming.layer_group_size)
    plan, tier = plan_transformers(settings, model.config, runtime, weights, skeleton.attention)
    longest = model.config.max_position_embeddings
    return model, TransformersParts(at_plan(runtime, notes, plan, tier), notes, loader, weights, longest), plan, tier


def run_transformers(
    settings: Settings, parts: TransformersParts, plan: Plan, tier: Tier, on_progress: Progress
) -> Running:
    """Load resident weights, open the stream of the others, and return the runner with that stream.

    Raises:
        CheckpointError: a file has changed, or holds values that are no weights.
    """
    runtime, weights = parts.runtime, parts.weights
    load_resident_skeleton(weights, runtime.device, on_progress, moved_names(weights, plan))
    stream = open_transformers_stream(weights, plan, tier, runtime.device, settings.streaming.pinned_memory)
    return Running(TransformersRunner(weights, stream.policy, runtime, parts.longest), stream)


def check_settings(settings: Settings) -> None:
    """Check that every setting has an effect on a transformers model.

    Raises:
        ConfigError: a setting has no effect there.
    """
    refused = (
        ("graph", settings.graph.kind, ("auto", "eager"), "transformers' classes run as they are, uncompiled"),
        ("quant", settings.quant.format, (STORED,), "transformers' classes multiply dense weights"),
        ("quant.activations", settings.quant.activations, ("auto", "float"), "only packed weights round activations"),
        ("kv_dtype", settings.kv_dtype, ("auto",), "transformers' caches have the compute dtype"),
        ("dependent_launches", settings.dependent_launches, ("auto", "off"), "its steps are not captured"),
        ("model.num_hidden_layers", settings.model.num_hidden_layers, (None,), "all layers run"),
    )
    for key, value, allowed, reason in refused:
        if value not in allowed:
            raise ConfigError(f"{key}={value} is not possible with {WITHOUT}: {reason}; leave it out")


def fallback_runtime(
    settings: Settings, model: TransformersModel, config: "PreTrainedConfig", notes: list[str]
) -> RuntimeConfig:
    """Return the runtime configuration of a transformers model on this machine.

    Args:
        notes: list that a line is added to if prompts run whole.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype.name, stored_dtype(model.checkpoint, model.config), device)
    if settings.model.attention == "flash_attention_2":
        _check_flash(device, dtype)
    context_length = choose_context_length(settings, model.config.max_position_embeddings)
    runs_whole = why_whole(config)
    if runs_whole:
        notes.append(f"prompts run whole, and one by one: {runs_whole}")
    return RuntimeConfig(
        device=device,
        dtype=dtype,
        kv_dtype=kv_types(dtype),
        graph="eager",
        prefill="eager",
        context_length=context_length,
        batch_size=1 if runs_whole else settings.batching.max_sequences,
        prefill_chunk=context_length if runs_whole else min(settings.prefill_chunk, context_length),
        packing=PackingPolicy(TorchBackend(), "float", STORED),
    )


def _check_flash(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"model.attention=flash_attention_2 runs on CUDA devices only, and this is {device}; use sdpa or eager"
        )
    if dtype is torch.float32:
        names = {value: name for name, value in DTYPES.items()}
        raise ConfigError(
            f"model.attention=flash_attention_2 computes in 16 bits, and dtype={names[dtype]}; use dtype=bf16 or sdpa"
        )


def plan_transformers(
    settings: Settings, config: ModelConfig, runtime: RuntimeConfig, weights: SkeletonWeights, attention: str
) -> tuple[Plan, Tier]:
    """Return the plan, and the tier that streamed weights are read from.

    Raises:
        PlanError: the model does not fit on the device or in RAM; the message has the smallest budget that works.
    """
    streaming, machine, is_on_cpu = settings.streaming, Machine.here(runtime.device), runtime.device.type == "cpu"
    tier = choose_tier(streaming, runtime.device, weights.loader)
    # A weight that is no matrix of rows is read whole.
    movable = (weight for group in weights.groups() for weight in group.weights)
    reads = buffer_nbytes(tier, [weight.tensor.nbytes for weight in movable if weight.tensor.dim() > 2])
    own = ((name, tensor) for name, tensor in weights.weights.items() if name not in weights.shared)
    costs = Costs(
        kv_nbytes=lambda tokens: cached_nbytes(config, runtime, tokens),
        workspace_nbytes=pass_nbytes(config, runtime, attention),
        buffer_nbytes=reads if is_on_cpu else 0,
        overhead_nbytes=0 if is_on_cpu else LIBRARIES,
        loading_nbytes=max(
            making_nbytes(weights.loader, name, None, tensor.dtype) + (0 if is_on_cpu else tensor.nbytes)
            for name, tensor in own
        ),
    )
    plan = plan_streaming(weights.sizes(), plan_request_of(settings, runtime.context_length), costs, machine.memory)
    check_host(streaming, plan, tier, machine, ram_nbytes(plan, tier, reads))
    return plan, tier


def cached_nbytes(config: ModelConfig, runtime: RuntimeConfig, tokens: int) -> int:
    """Return the bytes of keys and values of `tokens` tokens, assuming that every layer keeps both for each token."""
    heads = config.attention.num_key_value_heads * config.attention.head_dim
    return 2 * config.num_hidden_layers * heads * tokens * runtime.batch_size * runtime.dtype.itemsize


def pass_nbytes(config: ModelConfig, runtime: RuntimeConfig, attention: str) -> int:
    """Return an estimate of the bytes that one prefill chunk takes at once, with a copy of one layer's cache.

    transformers' classes do not state it. Eager attention holds every head's scores of a chunk, also in float32.
    """
    rows = runtime.batch_size * runtime.prefill_chunk
    itemsize = runtime.dtype.itemsize
    activations = rows * (8 * config.hidden_size + 4 * config.intermediate_size) * itemsize
    heads = config.attention.num_attention_heads if attention == "eager" else 1
    scores = rows * runtime.context_length * heads * (2 * itemsize + 4)
    copied = 2 * cached_nbytes(config, runtime, runtime.context_length) // config.num_hidden_layers
    logits = 2 * runtime.batch_size * config.vocab_size * 4
    return activations + scores + copied + logits
