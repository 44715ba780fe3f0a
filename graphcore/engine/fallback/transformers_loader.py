"""From a checkpoint to a transformers model that an engine can run: model.fallback=transformers.

source -> local folder -> SafetensorsCheckpoint -> transformers config -> Skeleton -> Loader -> groups -> runner
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from graphcore.arch.checkpoint_config import stored_dtype
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.sources.source import RandomSource
from graphcore.config.settings import Settings
from graphcore.device import DTYPES
from graphcore.engine.fallback.compiled_layers import CompiledLayers
from graphcore.engine.fallback.config import check_sizes, model_config_of, read_transformers_config, why_whole
from graphcore.engine.fallback.prepared_skeleton import PreparedSkeleton
from graphcore.engine.fallback.runner import TransformersRunner
from graphcore.engine.fallback.skeleton import build_skeleton
from graphcore.engine.fallback.skeleton_weights import SkeletonWeights
from graphcore.engine.fallback.stored_names import match_skeleton, notes_on_left_out
from graphcore.engine.loading.model_loader import ModelLoader, Running
from graphcore.engine.loading.open_model import OpenedModel, fetch_checkpoint, read_tokenizer
from graphcore.engine.loading.plan_run import plan_run
from graphcore.engine.loading.runtime_config import RuntimeConfig, choose_context_length, device_and_dtype
from graphcore.errors import ConfigError, UnsupportedError
from graphcore.graph.compile import code_folder
from graphcore.kernels.backend import TorchBackend
from graphcore.kernels.ops.kv_formats import kv_types
from graphcore.progress import Progress
from graphcore.quant.format_choice import STORED
from graphcore.streaming.weight_stream import stream_weights
from graphcore.weights.packed_weights import PackingPolicy
from graphcore.weights.plan import Plan, Tier

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_log = logging.getLogger(__name__)
WITHOUT = "model.fallback=transformers"


@dataclass(frozen=True, kw_only=True)
class TransformersModel(OpenedModel):
    """An opened model that one of transformers' classes runs.

    Its `config` has the sizes and token ids of any model; all else stays in the class's own config.

    Attributes:
        class_config: config of transformers' class.
    """

    class_config: "PreTrainedConfig"


class TransformersLoader(ModelLoader[TransformersModel, PreparedSkeleton]):
    """Models that transformers' own classes run: model.fallback=transformers."""

    def open(self, settings: Settings, on_progress: Progress) -> TransformersModel:
        """Return the model that the settings name, downloaded if need be; no weight is read.

        Raises:
            ConfigError: a setting has no effect here.
            CheckpointError: there is no checkpoint, or it is damaged.
            UnsupportedError: transformers has no such model, or its weights are not of a supported form.
        """
        check_settings(settings)
        if settings.model.checkpoint.endswith(".gguf"):  # before it is downloaded
            raise reads_no_gguf(settings.model.checkpoint)
        found = fetch_checkpoint(settings.model, settings.cache_folder, on_progress)
        if isinstance(found, RandomSource):
            raise ConfigError(f"{WITHOUT} needs a checkpoint, and random: makes weights of graphcore's own models only")
        _, checkpoint = found
        if not isinstance(checkpoint, SafetensorsCheckpoint):
            raise reads_no_gguf(checkpoint.source)
        class_config = read_transformers_config(checkpoint.folder)
        config = model_config_of(class_config, checkpoint.folder)
        tokenizer, unread = read_tokenizer(checkpoint, settings.cache_folder)
        check_sizes(config, checkpoint)
        return TransformersModel(
            checkpoint=checkpoint,
            config=config,
            dtype=stored_dtype(checkpoint, config),
            tokenizer=tokenizer,
            unread=unread,
            class_config=class_config,
        )

    def prepare(self, settings: Settings, model: TransformersModel, on_progress: Progress) -> PreparedSkeleton:
        """Return the model's skeleton, its runtime configuration and the loader of its weights; no weight is read.

        Raises:
            ConfigError: the machine or the model cannot do what was asked.
            CheckpointError: names or shapes are wrong.
            UnsupportedError: the model's layers, buffers or weights are not of a supported form.
        """
        config, source = model.config, model.checkpoint.source
        how = "decode steps compiled layer by layer" if settings.graph.kind == "compiled" else "eager"
        notes = [*config.notes, f"{config.model_type} runs through transformers' own classes, {how}"]
        runtime = fallback_runtime(settings, model, notes)
        skeleton = build_skeleton(model.class_config, settings.model.attention, runtime.dtype, source)
        loader = match_skeleton(skeleton, model.checkpoint)
        notes += notes_on_left_out(loader)
        weights = SkeletonWeights.of(skeleton, loader, settings.streaming.layers_per_group)
        return PreparedSkeleton(runtime, notes, loader, config, weights)

    def plan(
        self, settings: Settings, parts: PreparedSkeleton, on_progress: Progress
    ) -> tuple[PreparedSkeleton, Plan, Tier]:
        """Return the parts as the plan has them, the plan for this machine, and the tier of streamed weights.

        Raises:
            PlanError: the model does not fit; the message has the smallest budget that works.
            ConfigError: streaming.source names a tier that the weights cannot be read from.
        """
        return plan_run(settings, parts)

    def build(
        self, settings: Settings, parts: PreparedSkeleton, plan: Plan, tier: Tier, on_progress: Progress
    ) -> Running:
        """Load resident weights, open the stream of the others, and return the runner with that stream.

        Layers are compiled for one row, which shows those that cannot be.

        Raises:
            CheckpointError: a file has changed, or holds values that are no weights.
            UnsupportedError: the class fails in its first pass; only compiled layers make one here.
        """
        runtime, weights = parts.runtime, parts.weights
        moving = weights.moving(plan)
        weights.load_resident(runtime.device, on_progress, moving.names)
        stream = stream_weights(parts.loader, moving, tier, runtime.device, settings.streaming.pinned_memory)
        longest = parts.config.max_position_embeddings
        compiled = _compiled_layers(settings, parts, on_progress)
        runner = TransformersRunner(weights, stream.policy, runtime, longest, plan.spare_nbytes, compiled)
        if compiled is None:
            return Running(runner, stream)
        with ExitStack() as undo:
            undo.callback(stream.close)  # if the first pass fails
            runner.warm_up(1)
            undo.pop_all()
        compiled.on_eager = _log.warning
        if not compiled.is_any_compiled:
            return Running(runner, stream, replace(runtime, graph="eager", blocks="eager"))
        return Running(runner, stream)


def _compiled_layers(settings: Settings, parts: PreparedSkeleton, on_progress: Progress) -> CompiledLayers | None:
    """Return the layers to compile, with notes on those that cannot be; None with graph=eager."""
    runtime, names = parts.runtime, list[str]()
    if runtime.graph != "compiled":
        return None

    def report(name: str) -> None:
        names.append(name)
        on_progress(f"compile {name}", None, len(names), 0)

    folder, note = code_folder(settings.cache_folder, runtime.device)
    parts.notes.extend([note] if note else [])
    layers = parts.weights.skeleton.layer_modules()
    return CompiledLayers(layers, runtime.context_length, folder, report, parts.notes.append)


def check_settings(settings: Settings) -> None:
    """Check that every setting has an effect on a transformers model.

    Raises:
        ConfigError: a setting has no effect there.
    """
    refused = (
        ("graph", settings.graph.kind, ("auto", "compiled", "eager"), "transformers' classes are not captured"),
        ("graph.prefill", settings.graph.prefill, ("auto", "eager"), "prompts run transformers' classes as they are"),
        ("graph.blocks", settings.graph.blocks, ("auto",), "the layers are transformers' own"),
        ("graph.artefacts", settings.graph.artefacts, (None,), "its layers are compiled here"),
        ("quant", settings.quant.format, (STORED,), "transformers' classes multiply dense weights"),
        ("quant.activations", settings.quant.activations, ("auto", "float"), "only packed weights round activations"),
        ("kv_dtype", settings.kv_dtype, ("auto",), "transformers' caches have the compute dtype"),
        ("speculation", settings.speculation.kind, ("off",), "transformers' caches cannot take draft tokens back"),
        ("dependent_launches", settings.dependent_launches, ("auto", "off"), "its steps are not captured"),
        ("model.num_hidden_layers", settings.model.num_hidden_layers, (None,), "all layers run"),
    )
    for key, value, allowed, reason in refused:
        if value not in allowed:
            raise ConfigError(f"{key}={value} is not possible with {WITHOUT}: {reason}; leave it out")


def fallback_runtime(settings: Settings, model: TransformersModel, notes: list[str]) -> RuntimeConfig:
    """Return the runtime configuration of a transformers model on this machine.

    Args:
        notes: list that a line is added to if prompts run whole.

    Raises:
        ConfigError: the machine or the model cannot do what was asked.
    """
    device, dtype = device_and_dtype(settings, model)
    if settings.model.attention == "flash_attention_2":
        _check_flash(device, dtype)
    graph = "compiled" if settings.graph.kind == "compiled" else "eager"
    context_length = choose_context_length(settings, model.config.max_position_embeddings)
    runs_whole = why_whole(model.class_config)
    if runs_whole:
        notes.append(f"prompts run whole, and one by one: {runs_whole}")
    return RuntimeConfig(
        device=device,
        dtype=dtype,
        kv_dtype=kv_types(dtype),
        graph=graph,
        blocks=graph,
        prefill="eager",
        context_length=context_length,
        batch_size=1 if runs_whole else settings.batching.max_sequences,
        prefill_chunk=context_length if runs_whole else min(settings.prefill_chunk, context_length),
        packing=PackingPolicy(TorchBackend(), "float", STORED),
    )


def reads_no_gguf(source: str) -> UnsupportedError:
    """Return the error about a GGUF file."""
    return UnsupportedError(
        f"{source}: {WITHOUT} reads Hugging Face folders with safetensors, not GGUF; name one with model.checkpoint=, "
        "or with model.precision=full if the model group has it"
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
