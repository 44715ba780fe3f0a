"""No field of a spec is dead: change any one of them, and a small model says something else.

Every weight is drawn from its own name, so that a change moves nothing but what the field itself moves. A field that is
not in `CHANGES` fails the first test.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.cases import in_case
from torch import Tensor

from graphcore import Engine
from graphcore.activations import CLAMPED_SWIGLU, Gating
from graphcore.arch.random_checkpoint import RandomCheckpoint
from graphcore.errors import ConfigError
from graphcore.kvcache.buffers import allocate_cache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn import rope_spec
from graphcore.nn import spec as specs
from graphcore.nn.decoder import Decoder
from graphcore.nn.rope_spec import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    PositionScale,
    ProportionalScaling,
    RopeSpec,
    Scaling,
    YarnScaling,
)
from graphcore.nn.span import Span
from graphcore.nn.spec import (
    AttentionSpec,
    BlockSpec,
    ConvSpec,
    DeltaSpec,
    LatentSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    PerLayerSpec,
)
from graphcore.routing import ScoredRouting

CPU = torch.device("cpu")
TOKENS = 14
NORM = NormSpec("rms", 1e-3)
ATTENTION = AttentionSpec(4, 2, 8, 0.3, window=5, qk_norm=NORM, rope=RopeSpec(100.0))
BLOCK = BlockSpec(32, NORM, ATTENTION, MLPSpec(24, "silu"))
MODEL = ModelSpec(32, 20, (BLOCK, BLOCK), NORM, context=64, positions=TOKENS)
LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 32)
YARN = YarnScaling(8.0, 32, 1.2, beta_fast=2.0, beta_slow=0.5)
SWIGLU = Gating(CLAMPED_SWIGLU, 0.5, 1.702)
MOE = MoESpec(4, 2, 24, SWIGLU)
SIGMOID = ScoredRouting("sigmoid")
DELTA = DeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=6, width=3, eps=1e-3)
LATENT = LatentSpec(rank=12, rotated=4, nope=6, value_dim=10, query_rank=14, eps=1e-3)
PROPORTIONAL = ProportionalScaling(0.5)
FEATURES = PerLayerSpec(6, 2, 20, NORM)
LONG = LongScaling((1.0, 1.5, 2.0, 4.0), (2.0, 3.0, 5.0, 9.0), original_context=TOKENS - 1, attention_factor=1.2)
DIVISORS = DivisorScaling((1.0, 1.5, 2.0, 4.0))
GROWING = PositionScale(0.5, 4)

Change = Callable[[ModelSpec], ModelSpec]


def blocks(change: Callable[[BlockSpec], BlockSpec]) -> Change:
    return lambda model: replace(model, blocks=tuple(map(change, model.blocks)))


def attention(**fields: object) -> Change:
    return blocks(lambda block: replace(block, attention=replace(block.attention, **fields)))


def rope(**fields: object) -> Change:
    def of(block: BlockSpec) -> BlockSpec:
        assert block.attention.rope is not None
        return replace(block, attention=replace(block.attention, rope=replace(block.attention.rope, **fields)))

    return blocks(of)


def scaling(spec: Scaling) -> ModelSpec:
    return rope(scaling=spec)(MODEL)


def scaled(**fields: object) -> ModelSpec:
    """Return the model with scaled queries; `fields` are of PositionScale."""
    return attention(position_scale=replace(GROWING, **fields))(MODEL)


def mlp(**fields: object) -> Change:
    return blocks(lambda block: replace(block, mlp=replace(block.mlp, **fields)))


def mixture(**fields: object) -> ModelSpec:
    return block(mlp=replace(MOE, **fields))(MODEL)


def featured(**fields: object) -> ModelSpec:
    """Return the model with features of each layer; `fields` are of PerLayerSpec."""
    changed = replace(FEATURES, **fields)
    return replace(block(per_layer=changed.width, per_layer_activation="silu")(MODEL), per_layer=changed)


def sharing(**fields: object) -> ModelSpec:
    """Return the model with a last layer of another attention."""
    return replace(MODEL, blocks=(BLOCK, replace(BLOCK, attention=replace(ATTENTION, **fields))))


def delta(**fields: object) -> ModelSpec:
    return block(attention=replace(DELTA, **fields))(MODEL)


def latent(**fields: object) -> ModelSpec:
    """Return the model with latent attention; `fields` are of LatentSpec."""
    own = replace(LATENT, **fields)
    row, rotation = own.rank + own.rotated, RopeSpec(100.0, width=own.rotated)
    return block(attention=AttentionSpec(4, 1, row, 0.3, rope=rotation, latent=own))(MODEL)


def convolution(**fields: object) -> ModelSpec:
    return block(attention=replace(ConvSpec(channels=32, width=3), **fields))(MODEL)


def block(**fields: object) -> Change:
    return blocks(lambda one: replace(one, **fields))


# Field to a model and the same model with that field changed.
CHANGES: dict[str, tuple[ModelSpec, ModelSpec]] = {
    "NormSpec.kind": (MODEL, replace(MODEL, norm=replace(NORM, kind="layer"))),
    "NormSpec.eps": (MODEL, replace(MODEL, norm=replace(NORM, eps=1e-2))),
    "NormSpec.scale_in_float32": (MODEL, block(norm=replace(NORM, scale_in_float32=True))(MODEL)),
    "LinearScaling.factor": (scaling(LinearScaling(2.0)), scaling(LinearScaling(3.0))),
    "Llama3Scaling.factor": (scaling(LLAMA3), scaling(replace(LLAMA3, factor=4.0))),
    "Llama3Scaling.low_freq_factor": (scaling(LLAMA3), scaling(replace(LLAMA3, low_freq_factor=0.5))),
    "Llama3Scaling.high_freq_factor": (scaling(LLAMA3), scaling(replace(LLAMA3, high_freq_factor=6.0))),
    "Llama3Scaling.original_context": (scaling(LLAMA3), scaling(replace(LLAMA3, original_context=64))),
    "DivisorScaling.divisors": (scaling(DIVISORS), scaling(DivisorScaling((1.0, 1.5, 2.0, 5.0)))),
    "YarnScaling.factor": (scaling(YARN), scaling(replace(YARN, factor=4.0))),
    "YarnScaling.original_context": (scaling(YARN), scaling(replace(YARN, original_context=64))),
    "YarnScaling.attention_factor": (scaling(YARN), scaling(replace(YARN, attention_factor=1.0))),
    "YarnScaling.beta_fast": (scaling(YARN), scaling(replace(YARN, beta_fast=3.0))),
    "YarnScaling.beta_slow": (scaling(YARN), scaling(replace(YARN, beta_slow=0.25))),
    "YarnScaling.rounds_ramp": (scaling(YARN), scaling(replace(YARN, rounds_ramp=True))),
    "LongScaling.short": (
        scaling(replace(LONG, original_context=TOKENS)),
        scaling(replace(LONG, original_context=TOKENS, short=(1.0, 1.5, 2.0, 5.0))),
    ),
    "LongScaling.long": (scaling(LONG), scaling(replace(LONG, long=(2.0, 3.0, 5.0, 8.0)))),
    "LongScaling.original_context": (scaling(LONG), scaling(replace(LONG, original_context=TOKENS))),
    "LongScaling.attention_factor": (scaling(LONG), scaling(replace(LONG, attention_factor=1.0))),
    "ProportionalScaling.share": (scaling(PROPORTIONAL), scaling(ProportionalScaling(0.75))),
    "ProportionalScaling.factor": (scaling(PROPORTIONAL), scaling(ProportionalScaling(0.5, 2.0))),
    "PositionScale.beta": (scaled(), scaled(beta=0.4)),
    "PositionScale.period": (scaled(), scaled(period=5)),
    "AttentionSpec.position_scale": (MODEL, scaled()),
    "RopeSpec.theta": (MODEL, rope(theta=200.0)(MODEL)),
    "RopeSpec.scaling": (MODEL, scaling(LinearScaling(2.0))),
    "RopeSpec.width": (MODEL, rope(width=4)(MODEL)),
    "AttentionSpec.heads": (MODEL, attention(heads=2)(MODEL)),
    "AttentionSpec.kv_heads": (MODEL, attention(kv_heads=4)(MODEL)),
    "AttentionSpec.head_dim": (MODEL, attention(head_dim=16)(MODEL)),
    "AttentionSpec.scale": (MODEL, attention(scale=0.2)(MODEL)),
    "AttentionSpec.window": (MODEL, attention(window=6)(MODEL)),
    "AttentionSpec.qk_norm": (MODEL, attention(qk_norm=None)(MODEL)),
    "AttentionSpec.rope": (MODEL, attention(rope=None)(MODEL)),
    "AttentionSpec.qkv_bias": (MODEL, attention(qkv_bias=True)(MODEL)),
    "AttentionSpec.output_bias": (MODEL, attention(output_bias=True)(MODEL)),
    "AttentionSpec.sinks": (MODEL, attention(sinks=True)(MODEL)),
    "AttentionSpec.cap": (MODEL, attention(cap=2.0)(MODEL)),
    "AttentionSpec.output_gate": (MODEL, attention(output_gate=True)(MODEL)),
    "AttentionSpec.v_norm_eps": (MODEL, attention(v_norm_eps=1e-3)(MODEL)),
    "AttentionSpec.values_are_keys": (MODEL, attention(values_are_keys=True)(MODEL)),
    "AttentionSpec.shares_cache": (MODEL, sharing(shares_cache=True)),
    "AttentionSpec.qk_norm_over_heads": (MODEL, attention(qk_norm_over_heads=True)(MODEL)),
    "BlockSpec.pre_norm": (block(sandwich=True)(MODEL), block(sandwich=True, pre_norm=False)(MODEL)),
    "AttentionSpec.latent": (MODEL, latent()),
    "LatentSpec.rank": (latent(), latent(rank=14)),
    "LatentSpec.rotated": (latent(), latent(rotated=6)),
    "LatentSpec.nope": (latent(), latent(nope=8)),
    "LatentSpec.value_dim": (latent(), latent(value_dim=8)),
    "LatentSpec.query_rank": (latent(), latent(query_rank=0)),
    "LatentSpec.eps": (latent(), latent(eps=1e-1)),
    "PerLayerSpec.width": (featured(), featured(width=4)),
    "PerLayerSpec.layers": (featured(), featured(layers=3)),
    "PerLayerSpec.norm": (featured(), featured(norm=replace(NORM, eps=1e-2))),
    "BlockSpec.per_layer": (featured(), replace(MODEL, per_layer=FEATURES)),
    "BlockSpec.per_layer_activation": (featured(), block(per_layer_activation="gelu")(featured())),
    "BlockSpec.has_output_factor": (MODEL, block(has_output_factor=True)(MODEL)),
    "BlockSpec.low_rank": (MODEL, block(low_rank=(("mlp.up_proj", 2),))(MODEL)),
    "BlockSpec.residual_factor": (MODEL, block(residual_factor=0.5)(MODEL)),
    "ModelSpec.logit_cap": (MODEL, replace(MODEL, logit_cap=2.0)),
    "ModelSpec.logit_factor": (MODEL, replace(MODEL, logit_factor=0.5)),
    "ModelSpec.per_layer": (featured(), MODEL),
    "MoESpec.expert_scales": (mixture(), mixture(expert_scales=True)),
    "MoESpec.parallel_mlp": (mixture(), mixture(parallel_mlp=MLPSpec(24, "silu"))),
    "DeltaSpec.key_heads": (delta(), delta(key_heads=4)),
    "DeltaSpec.value_heads": (delta(), delta(value_heads=2)),
    "DeltaSpec.key_dim": (delta(), delta(key_dim=6)),
    "DeltaSpec.value_dim": (delta(), delta(value_dim=8)),
    "DeltaSpec.width": (delta(), delta(width=4)),
    "DeltaSpec.eps": (delta(), delta(eps=1e-2)),
    "DeltaSpec.tiled": (delta(), delta(tiled=True)),
    "ConvSpec.channels": (convolution(), convolution(channels=40)),
    "ConvSpec.width": (convolution(), convolution(width=4)),
    "ConvSpec.bias": (convolution(), convolution(bias=True)),
    "MoESpec.experts": (mixture(), mixture(experts=6)),
    "MoESpec.top_k": (mixture(), mixture(top_k=3)),
    "MoESpec.hidden": (mixture(), mixture(hidden=16)),
    "MoESpec.gating": (mixture(), mixture(gating=Gating("silu"))),
    "MoESpec.bias": (mixture(), mixture(bias=True)),
    "MoESpec.router_bias": (mixture(), mixture(router_bias=True)),
    "MoESpec.shares": (mixture(), mixture(shares="all")),
    "MoESpec.shared_hidden": (mixture(gating=Gating("silu")), mixture(gating=Gating("silu"), shared_hidden=8)),
    "MoESpec.shared_gate": (
        mixture(gating=Gating("silu"), shared_hidden=8),
        mixture(gating=Gating("silu"), shared_hidden=8, shared_gate=False),
    ),
    "MoESpec.scores_in_float32": (mixture(shares=SIGMOID), mixture(shares=SIGMOID, scores_in_float32=True)),
    "MoESpec.selection_bias": (mixture(shares=SIGMOID), mixture(shares=SIGMOID, selection_bias=True)),
    "AttentionSpec.sub_norm": (MODEL, attention(sub_norm=NORM)(MODEL)),
    "MLPSpec.hidden": (MODEL, mlp(hidden=16)(MODEL)),
    "MLPSpec.activation": (MODEL, mlp(activation="gelu")(MODEL)),
    "MLPSpec.gated": (MODEL, mlp(gated=False)(MODEL)),
    "MLPSpec.bias": (MODEL, mlp(bias=True)(MODEL)),
    "MLPSpec.sub_norm": (MODEL, mlp(sub_norm=NORM)(MODEL)),
    "BlockSpec.dim": (MODEL, replace(block(dim=16)(MODEL), dim=16)),
    "BlockSpec.norm": (MODEL, block(norm=replace(NORM, eps=1e-2))(MODEL)),
    "BlockSpec.attention": (MODEL, attention(scale=0.1)(MODEL)),
    "BlockSpec.mlp": (MODEL, mlp(activation="relu")(MODEL)),
    "BlockSpec.sandwich": (MODEL, block(sandwich=True)(MODEL)),
    "BlockSpec.int8_activations": (MODEL, block(int8_activations="online")(MODEL)),
    "BlockSpec.ordered_inputs": (MODEL, block(ordered_inputs=("mlp.down_proj",))(MODEL)),
    "ModelSpec.dim": (MODEL, replace(block(dim=48)(MODEL), dim=48)),
    "ModelSpec.blocks": (MODEL, replace(MODEL, blocks=(BLOCK,))),
    "ModelSpec.norm": (MODEL, replace(MODEL, norm=replace(NORM, scale_in_float32=True))),
    "ModelSpec.embedding_scale": (MODEL, replace(MODEL, embedding_scale=2.0)),
    "ModelSpec.positions": (MODEL, replace(MODEL, positions=0)),
    "ModelSpec.vocab": (MODEL, replace(MODEL, vocab=24)),
}
# Not arithmetic: a limit, where the head's bytes come from, and the number of rows of a table.
ELSEWHERE = {"ModelSpec.context", "ModelSpec.tied", "PerLayerSpec.vocab"}


def logits(spec: ModelSpec) -> Tensor:
    """Return the logits of one sequence in float16, where every rounding order shows: [T, V]."""
    decoder = Decoder(spec, torch.float16)
    for prefix, module in decoder.groups():
        for name, buffer in module.named_buffers():
            generator = torch.Generator().manual_seed(sum(map(ord, prefix + name)))
            if buffer.dtype is torch.int32:
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
                continue
            is_norm = "norm" in name and name.endswith("weight")
            noise = torch.randn(buffer.shape, generator=generator) * (0.3 if buffer.ndim == 1 else 0.2)
            buffer.copy_(noise + float(is_norm))
    span = Span(torch.tensor([0]), torch.tensor([TOKENS]))
    ids = torch.arange(TOKENS)[None]
    tables = decoder.rope_tables(TOKENS, CPU)
    x = decoder.embed_tokens(ids, span)
    caches = allocate_cache(spec, CacheSizes(1, TOKENS, torch.float16), CPU)
    make = decoder.embed_tokens.per_layer
    features = [()] * len(decoder.layers) if make is None else [(one,) for one in make(ids, x)]
    for layer, rope_index, cache, own in zip(decoder.layers, decoder.rope_index(), caches, features, strict=True):
        rows = None if rope_index is None else tables[rope_index][span.positions(TOKENS)]
        x = layer(x, rows, span, *cache.inputs, *own if layer.per_layer is not None else ())
    return decoder.head(x)[0]  # type: ignore[no-any-return]


def test_every_field_of_every_spec_is_changed_here() -> None:
    everything = (*vars(specs).values(), *vars(rope_spec).values())
    classes = [item for item in everything if dataclasses.is_dataclass(item)]
    fields = {f"{item.__name__}.{field.name}" for item in classes for field in dataclasses.fields(item)}
    assert fields == CHANGES.keys() | ELSEWHERE


@pytest.mark.thorough
def test_a_changed_field_changes_the_logits() -> None:
    for field in CHANGES:
        with in_case(field):
            before, after = (logits(spec) for spec in CHANGES[field])
            assert before.isfinite().all()
            assert after.isfinite().all()
            assert before.shape != after.shape or not torch.equal(before, after)


def test_the_same_spec_gives_the_same_logits() -> None:
    assert torch.equal(logits(MODEL), logits(replace(MODEL)))


def test_tied_decides_whether_there_is_a_head_to_store() -> None:
    untied = RandomCheckpoint(MODEL, 0).tensors.keys()
    assert untied - RandomCheckpoint(replace(MODEL, tied=True), 0).tensors.keys() == {"lm_head.weight"}


def test_context_is_the_most_that_can_be_asked_for() -> None:
    tiny = ["n_embd=16", "n_head=2", "n_layer=1", "n_positions=8", "vocab_size=20"]
    overrides = ["model=gpt2", *(f"model.random_config.{change}" for change in tiny)]
    with Engine.load("random:", graph="eager", overrides=[*overrides, "context_length=8"]) as engine:
        assert engine.choices.context_length == 8
    with pytest.raises(ConfigError, match="context_length=9, but the model was made for 8 tokens"):
        Engine.load("random:", graph="eager", overrides=[*overrides, "context_length=9"])


@pytest.mark.parametrize("gating", [SWIGLU._replace(limit=0.7), SWIGLU._replace(alpha=1.0), Gating("gelu")], ids=str)
def test_each_constant_of_experts_changes_the_logits(gating: Gating) -> None:
    assert not torch.equal(*(logits(mixture(gating=one)) for one in (SWIGLU, gating)))


@pytest.mark.parametrize(("one", "other"), [("online", "multiplied"), ("online", "divided"), ("divided", "multiplied")])
def test_the_order_of_an_int8_product_changes_the_logits(one: str, other: str) -> None:
    assert not torch.equal(*(logits(block(int8_activations=order)(MODEL)) for order in (one, other)))
