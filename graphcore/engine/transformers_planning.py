"""The plan of a transformers model's run, and where its streamed weights wait."""

from dataclasses import replace

from graphcore.checkpoint.model_config import ModelConfig
from graphcore.checkpoint.page_cache import cached_share
from graphcore.config.byte_sizes import in_words, parse_nbytes
from graphcore.config.settings import Settings
from graphcore.engine.assembly import Choices
from graphcore.engine.group_jobs import THREADS
from graphcore.engine.machine import Machine
from graphcore.engine.planning import CACHED, Tier, host_nbytes
from graphcore.errors import PlanError
from graphcore.streaming.jobs import BUFFER_NBYTES
from graphcore.weights.device_costs import LIBRARIES
from graphcore.weights.making import making_nbytes
from graphcore.weights.plan import Plan
from graphcore.weights.plan_streaming import Costs, Wishes, plan_streaming
from graphcore.weights.skeleton_groups import SkeletonWeights


def plan_transformers(
    settings: Settings, config: ModelConfig, choices: Choices, weights: SkeletonWeights, attention: str
) -> tuple[Choices, Plan, Tier]:
    """Return the plan, where streamed weights wait, and the choices as the plan has changed them (a smaller context).

    Raises:
        PlanError: it does not fit, on the device or in RAM; the message has the smallest budget that works.
    """
    streaming, machine = settings.streaming, Machine.here(choices.device)
    tier = choose_tier(settings, choices, weights)
    plan = plan_streaming(
        weights.sizes(),
        Wishes(
            policy=streaming.policy,
            budget=parse_nbytes("streaming.memory_budget", streaming.memory_budget),
            prefetch=None if streaming.prefetch == "auto" else streaming.prefetch,
            mode=streaming.mode,
            expert_cache=parse_nbytes("streaming.expert_cache", streaming.expert_cache),
            context=choices.context,
            may_halve_context=settings.context_length is None and streaming.policy != "off",
        ),
        Costs(
            kv_nbytes=lambda tokens: kv_nbytes(config, choices, tokens),
            workspace_nbytes=workspace_nbytes(config, choices, attention),
            buffer_nbytes=buffer_nbytes(weights, tier) if choices.device.type == "cpu" else 0,
            overhead_nbytes=LIBRARIES if choices.device.type == "cuda" else 0,
            loading_nbytes=loading_nbytes(weights, is_on_cpu=choices.device.type == "cpu"),
        ),
        machine.memory,
    )
    if tier.kind == "host" and plan.is_streaming:
        check_host(settings, machine, plan)
    context = plan.context or choices.context
    notes = (*choices.notes, *plan.notes, *([tier.note] if tier.note and plan.is_streaming else []))
    chunk = min(choices.prefill_chunk, context)
    return replace(choices, context=context, prefill_chunk=chunk, notes=notes), plan, tier


def loading_nbytes(weights: SkeletonWeights, is_on_cpu: bool) -> int:
    """Return the bytes of RAM that making the largest weight takes, besides its place there."""
    own = ((name, tensor) for name, tensor in weights.weights.items() if name not in weights.shared)
    return max(
        making_nbytes(weights.loader, name, None, tensor.dtype) + (0 if is_on_cpu else tensor.nbytes)
        for name, tensor in own
    )


def kv_nbytes(config: ModelConfig, choices: Choices, tokens: int) -> int:
    """Return the bytes of keys and values at a full context, as if every layer kept both of every token."""
    heads = config.num_key_value_heads * config.computed_head_dim
    return 2 * config.num_hidden_layers * heads * tokens * choices.batch_size * choices.dtype.itemsize


def workspace_nbytes(config: ModelConfig, choices: Choices, attention: str) -> int:
    """Return about the bytes that one prefill chunk takes at once, with the layer of a cache that is being copied.

    transformers' classes say nothing of that; eager attention holds every head's scores of a chunk, in float32 too.
    """
    rows = choices.batch_size * choices.prefill_chunk
    itemsize = choices.dtype.itemsize
    activations = rows * (8 * config.hidden_size + 4 * config.intermediate_size) * itemsize
    heads = config.num_attention_heads if attention == "eager" else 1
    scores = rows * choices.context * heads * (2 * itemsize + 4)
    copied = 2 * kv_nbytes(config, choices, choices.context) // config.num_hidden_layers
    logits = 2 * choices.batch_size * config.vocab_size * 4
    return activations + scores + copied + logits


def buffer_nbytes(weights: SkeletonWeights, tier: Tier) -> int:
    """Return the bytes that reads land in on their way to a slot; a weight that is no matrix of rows is read whole."""
    if tier.kind == "host":
        return 0
    whole = [place.tensor.nbytes for group in weights.groups() for place in group.places if place.tensor.dim() > 2]
    return (THREADS + 1) * BUFFER_NBYTES + 3 * max(whole, default=0)


def choose_tier(settings: Settings, choices: Choices, weights: SkeletonWeights) -> Tier:
    """Return where streamed weights will wait: RAM if asked for or for a GPU, else the files."""
    asked = settings.streaming.source
    if settings.streaming.policy == "off":
        return Tier("disk")
    if asked == "host" or (asked == "auto" and choices.device.type == "cuda"):
        return Tier("host")
    checkpoint = weights.loader.checkpoint
    share = cached_share(span for one in weights.loader.sources.values() for span in checkpoint.spans(one.name))
    if share >= CACHED:
        return Tier("disk", note=f"{share:.0%} of the weights are in the page cache: streaming reads them from there")
    return Tier("disk", is_direct=True)


def check_host(settings: Settings, machine: Machine, plan: Plan) -> None:
    """Return if the weights that wait in RAM fit there.

    Raises:
        PlanError: they do not; the message has what they need.
    """
    budget = parse_nbytes("streaming.host_memory_budget", settings.streaming.host_memory_budget)
    free = machine.ram_nbytes - (plan.peak_nbytes if machine.device.type == "cpu" else 0)
    needed, most = host_nbytes(plan), free if budget is None else min(budget, free)
    if needed > most:
        raise PlanError(
            f"streaming.source=host needs {in_words(needed)} of RAM for the weights that wait there, "
            f"{in_words(max(most, 0))} may be used; {needed} bytes would do; use streaming.source=disk"
        )
