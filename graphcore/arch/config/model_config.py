"""`ModelConfig`: the typed settings of a model, in one form for every kind of checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from graphcore.arch.config.other_names import HuggingFaceNames
from graphcore.checkpoint.quantized.scheme import QuantizedScheme
from graphcore.checkpoint.ternary_checkpoint import TernaryScaling
from graphcore.errors import CheckpointError, ConfigError
from graphcore.routing import ScoredRouting

RopeScaling = Mapping[str, str | float]


@dataclass(frozen=True)
class AttentionConfig:
    """The attention settings of a model, with the names of Hugging Face's config.json.

    Attributes:
        head_dim: width of one head.
        qkv_bias: True if q, k and v have biases.
        output_bias: True if the output projection has a bias.
        query_pre_attn_scalar: number whose square root divides attention scores; None for head_dim.
        sliding_window: number of tokens that a sliding layer attends to, including the query.
        sliding_window_pattern: distance between full-attention layers; layer_types already reflects it.
        layer_types: "sliding_attention", "full_attention", "linear_attention" or "conv" for each layer; None if
            there is no choice by layer.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    query_pre_attn_scalar: float | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    layer_types: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DeltaConfig:
    """The sizes of layers with a gated delta rule ("linear_attention"), with the names of Hugging Face's config.json.

    Attributes:
        linear_conv_kernel_dim: number of tokens that the short convolution sees.
        is_tiled: True if value heads are in the order of llama.cpp's files, those of one key head not side by side.
    """

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    is_tiled: bool = False

    def check(self, source: str) -> "DeltaConfig":
        """Return self after a check for consistency.

        Raises:
            CheckpointError: the value heads are no multiple of the key heads.
        """
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise CheckpointError(
                f"{source}: linear_num_value_heads {self.linear_num_value_heads} is not a multiple of "
                f"linear_num_key_heads {self.linear_num_key_heads}; correct one of them"
            )
        return self


@dataclass(frozen=True)
class RopeParameters:
    """The parameters of a model's rotary tables.

    Attributes:
        theta: base of the frequencies; only of full-attention layers if there is a local_theta.
        scaling: None, or {"rope_type": "linear" | "dynamic" | "llama3" | "yarn" | "longrope" | "proportional", ...}
            with exactly the keys of that type in `SCALING_KEYS` (rope_parameters.py); for yarn also beta_fast,
            beta_slow, attention_factor and truncate, for longrope attention_factor, for proportional
            partial_rotary_factor and factor, and for linear original_max_position_embeddings if the file has it.
        local_theta: base for sliding layers, which is never scaled (Gemma 3); None if all layers share one base.
        freq_divisors: [head_dim / 2] divisors of the frequencies, instead of a scaling (GGUF's rope_freqs).
        width: number of features of a head that rotate, from the first on; None for all.
        short_factors, long_factors: divisors of the frequencies in short and in long contexts, one for each pair that
            rotates; None for rope types other than longrope.
    """

    theta: float
    scaling: RopeScaling | None = None
    local_theta: float | None = None
    freq_divisors: tuple[float, ...] | None = None
    width: int | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of the layers that have them.

    Attributes:
        num_experts_per_tok: number of experts that a token is routed to.
        swiglu_limit, swiglu_alpha: constants of gpt-oss's activation; None for model types with another.
        moe_intermediate_size: hidden width of one expert; None for model types whose experts have intermediate_size.
        norm_topk_prob: True if the weights of a token's experts are renormalised to sum to one; False if they are those
            of a softmax over all experts.
        mlp_only_layers: indices of the layers that have an MLP instead of experts.
        shared_expert_intermediate_size: hidden width of the MLP that each token also runs through; None for model types
            without one.
        routing: rule by which experts have scores of their own, with norm_topk_prob, n_group, topk_group and
            routed_scaling_factor; None for model types whose shares are a softmax.
    """

    num_local_experts: int
    num_experts_per_tok: int
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_intermediate_size: int | None = None
    routing: ScoredRouting | None = None

    def check(self, source: str) -> "ExpertsConfig":
        """Return self after a check for consistency.

        Raises:
            CheckpointError: there are fewer experts than a token is routed to, or groups of experts do not fit.
        """
        if self.num_experts_per_tok > self.num_local_experts:
            raise CheckpointError(
                f"{source}: num_experts_per_tok {self.num_experts_per_tok} is above num_local_experts "
                f"{self.num_local_experts}; correct one of them"
            )
        if self.routing is not None and self.routing.groups > 1:
            self._check_groups(self.routing.groups, self.routing.used_groups, source)
        return self

    def _check_groups(self, groups: int, used: int, source: str) -> None:
        """Refuse groups that are unequal, have one expert, are fewer than those used, or have too few experts."""
        size = self.num_local_experts // groups
        if self.num_local_experts % groups or size < 2 or used > groups or self.num_experts_per_tok > used * size:
            raise CheckpointError(
                f"{source}: {groups} groups (n_group) of {self.num_local_experts} experts, of which a token uses "
                f"{used} (topk_group), do not fit with its {self.num_experts_per_tok} experts; correct them"
            )


class OwnSettings(Protocol):
    """The settings that only one family has: a frozen dataclass of the family's file."""

    def cut(self, num_layers: int) -> "OwnSettings":
        """Return the settings of the model's first `num_layers` layers."""


@dataclass(frozen=True)
class ModelConfig(HuggingFaceNames):
    """The normalised settings of a checkpoint's model, with the names of Hugging Face's config.json.

    Settings of a group are also read without it, as in config.json (`num_key_value_heads`, `rope_theta`).

    Attributes:
        model_type: key of `ARCHITECTURES`.
        intermediate_size: hidden width of the MLP; also of one expert, unless `experts` has its width.
        max_position_embeddings: longest context in tokens.
        rope: rotary parameters; None if positions are learned.
        delta: sizes of the layers with a gated delta rule; None if each layer attends.
        experts: settings of the experts; None if each layer has an MLP.
        norm_eps: epsilon of the model type's norm, RMSNorm or LayerNorm.
        hidden_act: activation, one of `ACTIVATIONS`.
        mlp_bias: True if the MLP's projections have biases.
        tie_word_embeddings: True if the embedding serves as the head when no head is stored.
        bos_token_id: id of the token that begins a text; None if there is none.
        eos_token_ids: ids that end generation, from the generation config first, then from the config.
        dtype: dtype that the weights were saved in, such as "bfloat16"; None if unknown.
        num_predicting_layers: number of multi-token-prediction (MTP) layers after the last one; they are left out.
        ternary: way in which the scales of ternary weights (BitNet) are stored and applied; None without such weights.
            Projections with ternary weights take int8 activations.
        quantized: layouts, bit widths and group sizes of weights in quantised layouts; None without them.
        own: settings that only the model's family has; None for families without such.
        notes: lines for the user about settings that were ignored.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    attention: AttentionConfig
    rope: RopeParameters | None = None
    delta: DeltaConfig | None = None
    experts: ExpertsConfig | None = None
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    num_predicting_layers: int = 0
    ternary: TernaryScaling | None = None
    quantized: QuantizedScheme | None = None
    own: OwnSettings | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def cut(self, num_layers: int | None, source: str) -> "ModelConfig":
        """Return the config of a model that is cut to its first `num_layers` layers; unchanged for None.

        Raises:
            ConfigError: the model has fewer layers.
        """
        if num_layers is None:
            return self
        if num_layers > self.num_hidden_layers:
            raise ConfigError(
                f"model.num_hidden_layers={num_layers}, but {source} has {self.num_hidden_layers} layers; ask for fewer"
            )
        layer_types = self.attention.layer_types[:num_layers] if self.attention.layer_types else None
        experts = self.experts
        if experts is not None:
            kept = tuple(layer for layer in experts.mlp_only_layers if layer < num_layers)
            experts = replace(experts, mlp_only_layers=kept)
        attention = replace(self.attention, layer_types=layer_types)
        own = None if self.own is None else self.own.cut(num_layers)
        return replace(self, num_hidden_layers=num_layers, attention=attention, experts=experts, own=own)


def read_head_dim(
    stated: int | None, hidden_size: int, num_heads: tuple[int, int], is_rotated: bool, source: str
) -> int:
    """Return the width of one head: the stated one, else hidden_size divided by the number of heads.

    Args:
        stated: width that the file states, or None.
        num_heads: number of query heads, and of kv heads.
        is_rotated: True if heads are rotated, which needs an even width.
        source: name of the file, for messages.

    Raises:
        CheckpointError: heads is no multiple of kv heads, hidden_size no multiple of heads, or a rotated width odd.
    """
    heads, kv_heads = num_heads
    if heads % kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
            "correct one of them"
        )
    if stated is None and hidden_size % heads:
        raise CheckpointError(
            f"{source}: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads} "
            "and there is no head_dim; give one"
        )
    head_dim = stated or hidden_size // heads
    if is_rotated and head_dim % 2:
        raise CheckpointError(f"{source}: head_dim {head_dim} is odd and cannot be rotated in pairs; correct it")
    return head_dim
