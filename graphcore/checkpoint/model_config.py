"""What the floors above know about a model: the settings of its checkpoint, typed, in one form for every source."""

from dataclasses import dataclass

from graphcore.checkpoint.config_defaults import CLASS_DEFAULTS
from graphcore.checkpoint.config_ternary import TernaryScaling
from graphcore.checkpoint.rope_parameters import RopeScaling
from graphcore.errors import CheckpointError


@dataclass(frozen=True)
class ModelConfig:
    """What a checkpoint says about its model, after normalisation; named as in Hugging Face's config.json.

    Attributes:
        model_type: a key of `CLASS_DEFAULTS`.
        intermediate_size: hidden width of the MLP, or of one expert.
        max_position_embeddings: tokens.
        head_dim: None is hidden_size // num_attention_heads; see `computed_head_dim`.
        rms_norm_eps: of RMSNorm models.
        rope_theta: base of the rotary frequencies (of full-attention layers).
        rope_scaling: None, or {"rope_type": "linear" | "llama3" | "yarn", ...}; see `RopeParameters`.
        rope_local_base_freq: base of sliding layers' rotary frequencies, never scaled (Gemma 3).
        attention_bias: q, k, v and o projections have biases.
        mlp_bias: the MLP's projections have biases.
        hidden_act: one of `ACTIVATIONS`.
        query_pre_attn_scalar: attention scores are divided by its square root; None is computed_head_dim.
        sliding_window: tokens a sliding layer attends, the query included.
        sliding_window_pattern: each such-numbered layer attends everything; already resolved into layer_types.
        layer_types: per layer "sliding_attention" or "full_attention"; None is full attention everywhere.
        tie_word_embeddings: the embedding serves as the head where no head is stored.
        layer_norm_eps: of LayerNorm models (GPT-2), else None.
        qkv_bias: q, k and v have biases (always so where attention_bias is true; Qwen 2 has these alone).
        rope_freq_divisors: [head_dim / 2] divisors of the frequencies, in place of rope_scaling (GGUF rope_freqs).
        bos_token_id, eos_token_ids: the union of what config and generation config say, generation first.
        num_local_experts, num_experts_per_tok: experts of a layer and how many a token goes through; None without any.
        swiglu_limit, swiglu_alpha: of the experts' clamped activation.
        dtype: the dtype the weights were saved in, such as "bfloat16"; None if unsaid.
        ternary: how the scales of ternary weights (BitNet), whose projections take int8 activations, are stored and
            applied; None where there are none.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    query_pre_attn_scalar: float | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    layer_types: tuple[str, ...] | None = None
    tie_word_embeddings: bool = False
    layer_norm_eps: float | None = None
    qkv_bias: bool = False
    rope_freq_divisors: tuple[float, ...] | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    dtype: str | None = None
    ternary: TernaryScaling | None = None

    @property
    def computed_head_dim(self) -> int:
        """Width of one head: as stored, else hidden_size // num_attention_heads."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    def check(self, source: str) -> "ModelConfig":
        """Return self if the sizes agree with each other.

        Raises:
            CheckpointError: heads do not divide by kv heads, hidden_size by heads, a rotated head is odd, or a token
                goes through more experts than there are.
        """
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise CheckpointError(
                f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
                "correct one of them"
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise CheckpointError(
                f"{source}: hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads} "
                "and there is no head_dim; give one"
            )
        if CLASS_DEFAULTS[self.model_type].has_rope and self.computed_head_dim % 2:
            raise CheckpointError(
                f"{source}: head_dim {self.computed_head_dim} is odd and cannot be rotated in pairs; correct it"
            )
        if (self.num_experts_per_tok or 0) > (self.num_local_experts or 0):
            raise CheckpointError(
                f"{source}: num_experts_per_tok {self.num_experts_per_tok} is above num_local_experts "
                f"{self.num_local_experts}; correct one of them"
            )
        return self
