"""Frozen specs of a model's architecture, from which the modules of this package are built.

Equal BlockSpecs share one compiled graph, so a spec has only fields that change the computation: no layer index, no
name, no path. The fields dim, heads, kv_heads, head_dim, hidden and vocab are sizes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Literal

from graphcore.activations import SILU, Gating
from graphcore.nn.rope_spec import PositionScale, RopeSpec
from graphcore.routing import ScoredRouting

SHOWN_IF_SET: Mapping[str, bool] = MappingProxyType({"is_shown_if_set": True})
"""Metadata of a field that a spec's text leaves out where it has its default."""


class ShortText:
    """Gives a spec a text without fields that have `repr=False`, and without unset ones that are `SHOWN_IF_SET`.

    Saved caches have a hash of the text. So they stay valid when a spec gets a field that is `SHOWN_IF_SET`, and are
    not valid for a model with another value of it.
    """

    def __repr__(self) -> str:
        """Return the spec as a call of its class."""
        texts = []
        for one in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, one.name)
            if one.repr and not (one.metadata == SHOWN_IF_SET and value == one.default):
                texts.append(f"{one.name}={value!r}")
        return f"{type(self).__name__}({', '.join(texts)})"


@dataclass(frozen=True)
class NormSpec:
    """One normalisation over the last axis.

    Attributes:
        kind: "rms" (x / rms(x) * weight) or "layer" (zero mean, unit variance, weight and bias).
        eps: number added to the mean square (rms) or the variance (layer).
        scale_in_float32: True to multiply by the weight before casting back to the compute dtype (Gemma, gpt-oss);
            False to cast first (Llama). The two round differently.
    """

    kind: str
    eps: float
    scale_in_float32: bool = False


Int8Order = Literal["divided", "multiplied", "online"]
"""The order in which codes q = round(x * s), a ternary weight t and its scale w become a product:

    divided      (q @ t) / (s * w)      transformers' BitLinear
    multiplied   ((q / s) @ t) * w      its AutoBitLinear
    online       (q / s) @ (t * w)      its AutoBitLinear on plain weights

The three differ only by rounding, but the next projection rounds to int8 again, where a difference in the last bit can
become a whole step of a code. With the order of the checkpoint's class, float32 logits are bit-identical to
transformers'.
"""


@dataclass(frozen=True)
class LatentSpec:
    """The widths of multi-head latent attention (MLA), computed with absorbed projections.

    A position has one row for all heads: a rotated key of R features, then C latent features, the normalised
    compressed keys and values. A head's query is compared with the whole row, and its output is a sum of latent
    features, which the head's own matrix turns into values.

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1; transformers, modeling_deepseek_v3, `DeepseekV3Attention`.

    Attributes:
        rank: number C of latent features.
        rotated: number R of rotated features of a query, and of the key that all heads share.
        nope: number of a head's query features without rotation.
        value_dim: width of a head's values.
        query_rank: features of the compressed queries, which have a norm of their own; 0 for a single projection.
        eps: epsilon of the norms of compressed queries and of latent features.
    """

    rank: int
    rotated: int
    nope: int
    value_dim: int
    query_rank: int
    eps: float


@dataclass(frozen=True, repr=False)
class AttentionSpec(ShortText):
    """Grouped-query attention.

    Attributes:
        scale: factor of q . k before the softmax.
        window: size of the sliding window, the query's own position included; None for full attention.
        qk_norm: normalisation of q and k per head before the rotation.
        qkv_bias, output_bias: True if the projections have biases.
        sinks: True if each head has an attention sink, a learned extra score in its softmax (gpt-oss).
        sub_norm: normalisation of the concatenated heads before the output projection (BitNet).
        cap: bound of the scores, cap * tanh(score / cap), before the mask and the softmax (Gemma 2); 0 for none.
        output_gate: True if the heads are multiplied by the sigmoid of another projection before the output projection
            (Qwen 3.5).
        v_norm_eps: epsilon of the rms normalisation of v per head, which has no weight (Gemma 4); 0 for none.
        values_are_keys: True if v is the key projection before its norm and rotation, without a projection of its own
            (Gemma 4).
        shares_cache: True if the layer has no keys and values of its own, and attends those of an earlier layer
            (`ModelSpec.cache_layers`) instead (cross-layer KV sharing).
        qk_norm_over_heads: True if `qk_norm` normalises q, and k, over all heads at once instead of per head (OLMo 2).
        latent: widths of latent attention; then kv_heads is 1, head_dim the width of a position's row, and qkv_bias
            that of the projections to compressed queries, keys and values. None for other attention.
        position_scale: factor of the rotated queries that grows with their position (Ministral 3); None for none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    qk_norm: NormSpec | None = None
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    sub_norm: NormSpec | None = None
    cap: float = 0.0
    output_gate: bool = False
    v_norm_eps: float = 0.0
    values_are_keys: bool = False
    shares_cache: bool = False
    qk_norm_over_heads: bool = field(default=False, metadata=SHOWN_IF_SET)
    latent: LatentSpec | None = field(default=None, metadata=SHOWN_IF_SET)
    position_scale: PositionScale | None = field(default=None, metadata=SHOWN_IF_SET)

    @property
    def values_from(self) -> int:
        """First feature of a position's row that belongs to the value; 0 if values have rows of their own."""
        return 0 if self.latent is None else self.latent.rotated

    @property
    def value_dim(self) -> int:
        """Width of the value of a position, and so of a head's output."""
        return self.head_dim - self.values_from


@dataclass(frozen=True)
class DeltaSpec:
    """A gated delta rule instead of attention: a recurrent state for each value head, and a short convolution.

    Source: Yang et al. 2024 (Gated Delta Networks), section 3; transformers, modeling_qwen3_next,
    `Qwen3NextGatedDeltaNet`.

    Attributes:
        key_heads, value_heads: number of heads of queries and keys, and of values, a multiple of the former.
        key_dim, value_dim: width of one head of queries and keys, and of values.
        width: number of tokens that the convolution sees, the current one included.
        eps: epsilon of the RMSNorm of each head's output, before its gate.
        tiled: True if value head h has the keys of head h % key_heads (GGUF files of Qwen 3.5); False if it has those
            of head h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: the features of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class ConvSpec:
    """A gated short convolution instead of attention (LFM2): project(c * convolution(b * x)) for projections b, c, x.

    Source: transformers, modeling_lfm2, `Lfm2ShortConv`.

    Attributes:
        channels: number of channels of the convolution, and features of each of b, c and x.
        width: number of tokens that the convolution sees, the current one included.
        bias: True if the convolution and the projections before and after it have biases.
    """

    channels: int
    width: int
    bias: bool = False


RecurrentSpec = DeltaSpec | ConvSpec
"""A layer with a state of fixed size instead of keys and values."""
MixerSpec = AttentionSpec | RecurrentSpec
"""The part of a layer in which a token reads earlier ones."""


@dataclass(frozen=True)
class MLPSpec:
    """down(act(gate(x)) * up(x)) when gated, else down(act(up(x))).

    Attributes:
        sub_norm: normalisation of the hidden features before the down projection (BitNet); None for none.
    """

    hidden: int
    activation: str
    gated: bool = True
    bias: bool = False
    sub_norm: NormSpec | None = None


Shares = Literal["chosen", "all"]
"""Scores in a router's softmax: only those of the chosen experts, whose shares then sum to one, or those of all."""


@dataclass(frozen=True, repr=False)
class MoESpec(ShortText):
    """A mixture of gated MLPs: each token's `top_k` likeliest experts, weighted by their shares in a softmax.

    Source: openai/gpt-oss, gpt_oss/torch/model.py, `swiglu` and `MLPBlock`; transformers, modeling_qwen3_moe,
    `Qwen3MoeTopKRouter`.

    Attributes:
        experts: number of experts.
        hidden: number of hidden features of one expert.
        gating: function of an expert's gate and up products.
        bias: True if the experts' projections have biases.
        router_bias: True if the router has biases.
        shares: scores in the softmax; or a rule by which experts have scores of their own (GLM 4.5, Granite).
        shared_hidden: hidden features of the shared expert; 0 for no shared expert.
        expert_scales: True if each expert's share is multiplied by a learned factor of that expert (Gemma 4).
        parallel_mlp: dense MLP in parallel to the experts (Gemma 4); None for experts alone. It and the experts each
            have a norm before and after them, the router has its own norm, and their outputs are added.
        selection_bias: True if each expert has a learned number that is added to its score for the choice alone; only
            with a `ScoredRouting`.
        shared_gate: True if the shared expert's output is multiplied by a sigmoid gate per token (Qwen).
        scores_in_float32: True if the router's products and the shares are float32 in all dtypes (GLM, DeepSeek).
    """

    experts: int
    top_k: int
    hidden: int
    gating: Gating = SILU
    bias: bool = False
    router_bias: bool = False
    shares: Shares | ScoredRouting = "chosen"
    shared_hidden: int = 0
    expert_scales: bool = False
    parallel_mlp: MLPSpec | None = None
    selection_bias: bool = field(default=False, metadata=SHOWN_IF_SET)
    shared_gate: bool = field(default=True, metadata=SHOWN_IF_SET)
    scores_in_float32: bool = field(default=False, metadata=SHOWN_IF_SET)


@dataclass(frozen=True)
class PerLayerSpec:
    """Per-layer features of a token: a row of a second embedding table plus a projection of the token's embedding.

    Source: transformers, modeling_gemma4, `get_per_layer_inputs` and `project_per_layer_inputs`.

    Attributes:
        width: number of features for each layer.
        layers: number of layers that a row has features for; a model truncated to fewer layers uses the first of them.
        vocab: number of rows of the second embedding table; a row has the features for all layers.
        norm: normalisation of the projected features, for each layer separately.
    """

    width: int
    layers: int
    vocab: int
    norm: NormSpec


@dataclass(frozen=True, repr=False)
class BlockSpec(ShortText):
    """One transformer block.

    Attributes:
        attention: spec of the token mixer: attention, a delta rule, or a gated short convolution.
        sandwich: True if each sublayer's output is also normalised before it is added to the residual (Gemma).
        int8_activations: order of multiplication if each projection rounds its input to int8, one scale per token
            (BitNet, with ternary weights); None for no rounding. The embedding and the head never round.
        per_layer: number of per-layer features that are gated and added at the block's end (Gemma 4); 0 for none.
        per_layer_activation: activation of that gate.
        has_output_factor: True if the stream is multiplied by a learned factor after the block (Gemma 4).
        ordered_inputs: names of projections in the block that have an `input_order` (GPTQ with act-order), such as
            "mlp.down_proj".
        low_rank: ranks of the low-rank factors beside projections (LoRA), by the projections' names in the block.
        pre_norm: False if sublayers read the stream itself, not normalised; only with `sandwich` (OLMo 2).
        residual_factor: factor of the outputs of attention and MLP before they are added to the stream (Granite).
            Experts have it in their shares (`ScoredRouting.factor`).
    """

    dim: int
    norm: NormSpec
    attention: MixerSpec
    mlp: MLPSpec | MoESpec
    sandwich: bool = False
    int8_activations: Int8Order | None = None
    per_layer: int = 0
    per_layer_activation: str = ""
    has_output_factor: bool = False
    # not in the text, because saved caches of models without them keep their fingerprints
    ordered_inputs: tuple[str, ...] = field(default=(), repr=False)
    low_rank: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    pre_norm: bool = field(default=True, metadata=SHOWN_IF_SET)
    residual_factor: float = field(default=1.0, metadata=SHOWN_IF_SET)


@dataclass(frozen=True, repr=False)
class ModelSpec(ShortText):
    """A decoder-only language model.

    Attributes:
        blocks: specs of the layers, in order.
        norm: final normalisation, before the head.
        embedding_scale: factor of token embeddings (Gemma: sqrt(dim)), or 1.
        positions: number of rows of a learned position table (GPT-2), or 0.
        context: context length that the model was trained for, in tokens.
        tied: True if the head reads the embedding's weight.
        logit_cap: bound of the logits, cap * tanh(logit / cap); 0 for none.
        logit_factor: factor of the logits before their cap (Granite).
        per_layer: per-layer features of tokens (Gemma 4); None for none.
    """

    dim: int
    vocab: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    context: int
    embedding_scale: float = 1.0
    positions: int = 0
    tied: bool = False
    logit_cap: float = 0.0
    per_layer: PerLayerSpec | None = None
    logit_factor: float = field(default=1.0, metadata=SHOWN_IF_SET)

    def with_ordered_inputs(self, names: Collection[str]) -> "ModelSpec":
        """Return the spec with an `input_order` for some projections of the blocks.

        Args:
            names: names of the projections in the decoder, such as "layers.0.mlp.up_proj".
        """
        found: dict[int, list[str]] = {}
        for name in names:
            _, index, leaf = name.split(".", 2)
            found.setdefault(int(index), []).append(leaf)
        blocks = (replace(one, ordered_inputs=tuple(found.get(index, ()))) for index, one in enumerate(self.blocks))
        return replace(self, blocks=tuple(blocks))

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The specs of the layers that attend, in order."""
        return tuple(block.attention for block in self.blocks if isinstance(block.attention, AttentionSpec))

    @property
    def ropes(self) -> tuple[tuple[RopeSpec, int], ...]:
        """The distinct pairs of rotation and head dim of the model, in order of first use."""
        return tuple(dict.fromkeys((one.rope, one.head_dim) for one in self.attentions if one.rope))

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """For each layer, the layer whose cache it uses: itself, or the last earlier one of its shape with own keys."""
        owners: dict[tuple[int | None, int, int], int] = {}
        found = []
        for index, block in enumerate(self.blocks):
            one = block.attention
            if isinstance(one, RecurrentSpec):
                found.append(index)
                continue
            shape = (one.window, one.kv_heads, one.head_dim)
            if not one.shares_cache:
                owners[shape] = index
            assert shape in owners, f"layer {index} shares the cache of no earlier layer"
            found.append(owners[shape])
        return tuple(found)
