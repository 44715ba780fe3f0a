"""From a checkpoint to a transformers model that an engine can run: model.fallback=transformers.

source -> local folder -> SafetensorsCheckpoint -> transformers config -> Skeleton -> Loader -> groups -> runner
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphcore.arch.transformers_config import model_config_of, why_whole
from graphcore.arch.transformers_fallback import build_skeleton, read_transformers_config
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.sources.fetch import fetch
from graphcore.checkpoint.sources.source import RandomSource, parse_source
from graphcore.config.settings import Settings
from graphcore.device import DTYPES, resolve_device, resolve_dtype
from graphcore.engine.assembly import DEFAULT_CONTEXT, Choices
from graphcore.engine.building import Running
from graphcore.engine.model import read_tokenizer, stored_dtype
from graphcore.engine.planning import Tier
from graphcore.engine.transformers_planning import plan_transformers
from graphcore.engine.transformers_runner import TransformersRunner
from graphcore.engine.transformers_stream import moved_names, open_transformers_stream
from graphcore.errors import ConfigError, UnsupportedError
from graphcore.progress import Progress
from graphcore.quant.choice import STORED
from graphcore.tokenizer.tokenizer import Tokenizer
from graphcore.weights.loader import Loader
from graphcore.weights.packed_weights import PackingPolicy
from graphcore.weights.plan import Plan
from graphcore.weights.skeleton_groups import SkeletonWeights
from graphcore.weights.skeleton_names import match_skeleton
from graphcore.weights.skeleton_residents import load_resident_skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WITHOUT = "model.fallback=transformers"


@dataclass(frozen=True)
class TransformersModel:
    """A checkpoint that transformers' classes understand.

    Attributes:
        config: what any model has; the rest stays in the class's own config.
        tokenizer: None if the checkpoint has none.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class TransformersParts:
    """What will run, before anything is allocated or read.

    Attributes:
        loader: of the weights.
        weights: sorted by how they can move.
    """

    choices: Choices
    loader: Loader
    weights: SkeletonWeights


def load_transformers(
    settings: Settings, on_progress: Progress
) -> tuple[TransformersModel, TransformersParts, Running, Plan]:
    """Return a model, its parts, what runs it and the plan that it keeps to; weights that stay are loaded.

    Raises:
        GraphcoreError: a setting, the checkpoint or the machine stands in the way; the message says what to do.
    """
    model, parts, plan, tier = open_transformers(settings, on_progress)
    device = parts.choices.device
    load_resident_skeleton(parts.weights, device, on_progress, moved_names(parts.weights, plan))
    stream = open_transformers_stream(parts.weights, plan, tier, device, settings.streaming.pinned_memory)
    runner = TransformersRunner(parts.weights, stream.policy, parts.choices, model.config.max_position_embeddings)
    return model, parts, Running(runner, stream), plan


def open_transformers(
    settings: Settings, on_progress: Progress
) -> tuple[TransformersModel, TransformersParts, Plan, Tier]:
    """Return the model that the settings name, fetched if need be, what will run, and the plan; no weight is read.

    Raises:
        ConfigError: a setting has no effect here, or the model or machine cannot do what was asked.
        CheckpointError: there is no checkpoint, it is damaged, or names or shapes are wrong.
        UnsupportedError: transformers has no such model, or it is not built as this needs it.
        PlanError: it does not fit.
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
        checkpoint, model_config_of(config, checkpoint.folder), read_tokenizer(checkpoint, cache_dir)
    )
    choices = choose(settings, model, config)
    skeleton = build_skeleton(config, settings.model.attention, choices.dtype, checkpoint.source)
    loader = match_skeleton(skeleton, checkpoint)
    weights = SkeletonWeights.of(skeleton, loader, settings.streaming.layer_group_size)
    choices, plan, tier = plan_transformers(settings, model.config, choices, weights, skeleton.attention)
    return model, TransformersParts(choices, loader, weights), plan, tier


def check_settings(settings: Settings) -> None:
    """Return if every setting has the effect here that it is asked for.

    Raises:
        ConfigError: one has not.
    """
    refused = (
        ("graph", settings.graph.kind, ("auto", "eager"), "transformers' classes run as they are, uncompiled"),
        ("quant", settings.quant.format, (STORED,), "transformers' classes multiply dense weights"),
        ("quant.activations", settings.quant.activations, ("auto", "float"), "only packed weights round activations"),
        ("kv_dtype", settings.kv_dtype, ("auto",), "transformers' caches have the compute dtype"),
        ("model.num_hidden_layers", settings.model.num_hidden_layers, (None,), "all layers run"),
    )
    for key, value, allowed, reason in refused:
        if value not in allowed:
            raise ConfigError(f"{key}={value} is not possible with {WITHOUT}: {reason}; leave it out")


def choose(settings: Settings, model: TransformersModel, config: "PreTrainedConfig") -> Choices:
    """Return what the settings come to for this model on this machine.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype.name, stored_dtype(model.checkpoint, model.config), device)
    if settings.model.attention == "flash_attention_2":
        _check_flash(device, dtype)
    longest = model.config.max_position_embeddings
    context = settings.context_length or min(longest, DEFAULT_CONTEXT)
    if context > longest:
        raise ConfigError(f"context_length={context}, but the model was made for {longest} tokens")
    notes = [f"{model.config.model_type} runs through transformers' own classes, eager"]
    runs_whole = why_whole(config)
    if runs_whole:
        notes.append(f"prompts run whole, and one by one: {runs_whole}")
    return Choices(
        device=device,
        dtype=dtype,
        kv_dtype=dtype,
        graph="eager",
        prefill="eager",
        context=context,
        batch_size=1 if runs_whole else settings.batch_size,
        prefill_chunk=context if runs_whole else min(settings.prefill_chunk, context),
        packing=PackingPolicy(None, "float", STORED),
        notes=tuple(notes),
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
