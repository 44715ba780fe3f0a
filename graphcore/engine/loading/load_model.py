"""From settings to a loaded model: opened, prepared, planned and built, one way for both kinds of model."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphcore.arch.config.model_config import ModelConfig
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.config.settings import Settings
from graphcore.device import (
    collect_garbage,
    device_of_rank,
    resolve_device,
    return_blocks_when_freed,
    return_freed_memory,
    use_threads,
)
from graphcore.engine.loading.decoder_loader import DecoderLoader
from graphcore.engine.loading.layer_shares import interleavings, shares_note
from graphcore.engine.loading.model_loader import M, ModelLoader, P
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.engine.ring.facts import agreed_settings, found_facts, together
from graphcore.engine.ring.rank_times import RankShare, rank_shares
from graphcore.engine.sampling_defaults import SamplingDefaults, sampling_defaults
from graphcore.errors import PlanError
from graphcore.gpu_memory import FreeMemory
from graphcore.parallel.handshake import compare_ranks
from graphcore.parallel.process_group import ProcessGroup
from graphcore.processors import refuse_forked, spinning_note
from graphcore.progress import Progress
from graphcore.streaming.weight_stream import WeightStream
from graphcore.threads import ENGINE_THREADS, refuse_many_threads
from graphcore.weights.draft_copy import DraftCopy
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Plan, Tier, expected_bytes_per_token

COLLECTED_NBYTES = 64 << 20  # of a model whose memory is collected at once: a collection takes a tenth of a second


@dataclass
class LoadedModel:
    """A model that is ready to run: its resident weights are loaded, the others are left to the weight stream.

    Attributes:
        settings: the settings as they were given.
        config: the checkpoint's configuration with graphcore's names and its defaults filled in.
        prompts: encoder of texts and messages to token ids.
        runtime: the device, dtype, graph kind and context length that really run.
        notes: lines about what graphcore chose or what may surprise.
        loader: sources of the weights, and the errors of those that were packed at load.
        plan: bytes on the device.
        tier: tier that streamed weights are read from.
        weight_stream: mover of the streamed weights, with a record of what it moved.
        runner: runner of the programs; None after `give_back`.
        draft: draft model, with the bytes of all copies that it could have; None without one.
        free_memory: record of a GPU's free memory since before loading; None on the CPU.
        ranks: process group of the ranks that run the model together; None if this process runs it alone.
        shares: what each of these ranks has, in order.
        sampling: the sampling parameters of requests that do not set them.
    """

    settings: Settings
    config: ModelConfig
    prompts: PromptEncoder
    runtime: RuntimeConfig
    notes: Sequence[str]
    loader: Loader
    plan: Plan
    tier: Tier
    weight_stream: WeightStream
    runner: ModelRunner | None
    draft: DraftCopy | None = None
    free_memory: FreeMemory | None = None
    ranks: ProcessGroup | None = None
    shares: Sequence[RankShare] = ()
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation: those of the tokenizer and those of the config."""
        ends, tokenizer = frozenset(self.config.eos_token_ids), self.prompts.known
        return ends | frozenset(tokenizer.eos_token_ids) if tokenizer else ends

    def stats_of(self, runner: ModelRunner) -> dict[str, int | str | float]:
        """Return the entries of `Engine.stats`; those of captured graphs and an expert cache only where they exist."""
        runtime, plan = self.runtime, self.plan
        hit_rate, captures = self.weight_stream.expert_hit_rate, runner.captures
        return {
            "graph": runtime.graph,
            "blocks": runtime.blocks,
            "prefill": runtime.prefill,
            "dtype": str(runtime.dtype).removeprefix("torch."),
            "device": str(runtime.device),
            "compiled_graphs": runner.num_compiled,
            "weight_bytes": plan.weight_nbytes,
            "kv_bytes": plan.kv_nbytes,
            **({} if captures is None else captures.stats),
            **({} if hit_rate is None else {"expert_hit_rate": hit_rate}),
        }

    def enter_thread(self) -> None:
        """Prepare the calling thread for the runner's programs."""
        assert self.runner is not None, "a queue that is not closed has a runner"
        self.runner.enter_thread()

    def check_usable(self) -> None:
        """Check, after a pass that failed, that another one can run: the device answers, and weights can be read.

        Raises:
            Exception: it cannot; the error says why.
        """
        if self.ranks is not None:
            self.ranks.check()
        device = self.runner.device if self.runner is not None else torch.device("cpu")
        if device.type == "cuda":
            torch.zeros(1, dtype=torch.float32, device=device).add_(1)
            torch.cuda.synchronize(device)
        self.weight_stream.check_usable()

    def give_back(self) -> None:
        """Free weights and caches; the model cannot run any more."""
        if self.runner is None:
            return
        try:
            self.runner.release()
            self.weight_stream.close()
        finally:
            if self.ranks is not None:
                self.ranks.dismiss()
            self.weight_stream = self.weight_stream.without_weights()
            self.runner = None
            if self.plan.total_nbytes >= COLLECTED_NBYTES:
                collect_garbage(self.runtime.device)


Check = Callable[[PromptEncoder], None]


def no_check(_prompts: PromptEncoder) -> None:
    """Accept any checkpoint."""


def load_model(settings: Settings, on_progress: Progress, check: Check = no_check) -> LoadedModel:
    """Load the model that the settings ask for.

    Args:
        check: function that is called before weights are read; it may raise an error to stop loading.

    Raises:
        GraphcoreError: a setting, the checkpoint or the machine stands in the way; the message says what to do.
    """
    ranks = ProcessGroup.join(settings.parallel) if settings.parallel.kind == "ring" else None

    def progress(stage: str, group: int | None, done: int, total: int) -> None:
        if ranks is not None:
            ranks.check_loading()
        on_progress(stage, group, done, total)

    with together(ranks):
        return _load_here(settings, progress, check, ranks)


def _load_here(settings: Settings, on_progress: Progress, check: Check, ranks: ProcessGroup | None) -> LoadedModel:
    """Load the model, or this rank's share of it."""
    if ranks is not None:
        settings = agreed_settings(settings, ranks)
        settings = replace(settings, device=str(device_of_rank(settings.device, ranks.launch.local_rank)))
    device = resolve_device(settings.device)
    free_memory: FreeMemory | None = None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches kernels on the device that is current
        free_memory = FreeMemory.begin(device)
    if ranks is not None:
        ranks.place_on(device, settings.parallel.transport)
    use_threads(settings.threads, 1 if ranks is None else ranks.launch.local_world_size)
    refuse_forked(torch.get_num_threads())
    refuse_many_threads(torch.get_num_threads(), ENGINE_THREADS)  # before gigabytes are read in vain
    try:
        loaded = _load(loaders_of(settings, ranks), settings, on_progress, check, ranks)
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PlanError(
            f"the device has less memory than the plan counted on ({reason}); end what else uses it, or set a smaller "
            "streaming.memory_budget"
        ) from error
    # Without this the stream's threads would keep slots and files of an engine that was never closed.
    weakref.finalize(loaded.runner, loaded.weight_stream.close)
    if ranks is not None:
        weakref.finalize(loaded.runner, ranks.leave)
    if device.type == "cpu" and loaded.plan.is_streaming:
        return_blocks_when_freed()  # else freed activations that malloc keeps would exceed the budget
    return_freed_memory()
    if free_memory is not None:
        free_memory.look("loaded")
    added = (*loaded.prompts.notes, loaded.weight_stream.note, spinning_note())
    notes = (*loaded.notes, *(note for note in added if note))
    return replace(loaded, notes=notes, free_memory=free_memory)


def _load(
    loaders: Sequence[ModelLoader[M, P]],
    settings: Settings,
    on_progress: Progress,
    check: Check,
    ranks: ProcessGroup | None,
) -> LoadedModel:
    """Load a model with the first of the loaders under whose plan nothing streams on any rank, else with the last.

    Notes about memory and threads are left to `load_model`.
    """
    model, prompts = _open(loaders[0], settings, on_progress, check)
    is_chat = model.tokenizer is not None and model.tokenizer.has_chat_template
    sampling = sampling_defaults(
        model.checkpoint, is_chat, settings.model.recommended_sampling, settings.sampling.typed
    )
    for loader in loaders:
        parts, plan, tier = loader.plan(settings, loader.prepare(settings, model, on_progress), on_progress)
        if ranks is None or not any(ranks.all_say(plan.is_streaming)):
            break
    parts, plan, tier = loader.agree(settings, parts, plan, tier)
    if ranks is not None:
        parts.notes.extend(compare_ranks(ranks.all_say(found_facts(parts))))
        read = ranks.all_say(expected_bytes_per_token(plan))
        parts.notes.append("" if parts.runtime.share is None else shares_note(parts.runtime.share, read))
    shares = rank_shares(ranks, parts, plan) if ranks is not None and isinstance(parts, PreparedDecoder) else ()
    running = loader.build(settings, parts, plan, tier, on_progress)
    if isinstance(model.checkpoint, GGUFCheckpoint):
        model.checkpoint.forget_arrays()  # the tokenizer has read what it needs of them
    return LoadedModel(
        settings,
        model.config,
        prompts,
        running.runtime or parts.runtime,
        [*parts.notes, *sampling.notes],
        parts.loader,
        plan,
        tier,
        running.stream,
        running.runner,
        parts.draft if isinstance(parts, PreparedDecoder) else None,
        ranks=ranks,
        shares=shares,
        sampling=sampling,
    )


def _open(
    loader: ModelLoader[M, P], settings: Settings, on_progress: Progress, check: Check
) -> tuple[M, PromptEncoder]:
    """Open a model, and return it with the encoder of its prompts."""
    model = loader.open(settings, on_progress)
    if model.tokenizer is not None and settings.chat != "off" and settings.prompt_ids is None:
        model.tokenizer.prepare_chat()
    source, vocab = model.checkpoint.source, model.config.vocab_size
    prompts = PromptEncoder(model.tokenizer, source, settings.special_tokens, vocab, model.unread)
    check(prompts)
    return model, prompts


def loaders_of(settings: Settings, ranks: ProcessGroup | None = None) -> Sequence[ModelLoader[Any, Any]]:
    """Return the loaders to try: of graphcore's own models, or of model.fallback=transformers.

    Args:
        ranks: process group of the ranks that share the model: neighbouring layers if nothing streams, else
            interleaved ones. None if this process has the model alone.
    """
    if settings.model.fallback is None:
        if ranks is None:
            return [DecoderLoader()]
        return [DecoderLoader(ranks, is_interleaved) for is_interleaved in interleavings(settings.streaming)]
    from graphcore.engine.fallback.transformers_loader import TransformersLoader  # optional, a dozen modules

    return [TransformersLoader()]
