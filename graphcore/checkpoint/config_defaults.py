"""What a config.json leaves unsaid: the class defaults of each supported model type, and its own field names.

Hub files omit whatever equals the default of the transformers class that wrote them (nested text configs even the
sizes), so these numbers are part of the checkpoint. Source: transformers 5.23, models/*/configuration_*.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ClassDefaults:
    """One model type's defaults and rules; fields without a comment are named as in `ModelConfig`.

    Attributes:
        num_key_value_heads: None is as many as query heads, which an explicit null also means.
        intermediate_size: None is four times hidden_size.
        sliding_window: tokens, where the file does not name it.
        window_rule: which layers slide when layer_types is absent: none, every one, those past max_window_layers if
            use_sliding_window asks for it, or all but each sliding_window_pattern-th.
        bias_rule: who decides about projection biases: nobody (there are none), the flags attention_bias and mlp_bias,
            the flag attention_bias alone, or the class, which has them on q, k and v, or everywhere.
        norm_eps: of the type's norm, RMSNorm or (without rope) LayerNorm.
        has_rope: positions are rotary; otherwise they are learned and every head is hidden_size / heads wide.
        sliding_window_pattern: where the rule is a pattern and the file does not say it.
        attention_bias: where attention_flag decides and the file does not say.
        rope_scaling: the scaling of a file that names none.
        yarn_truncate: whether YaRN's ramp is rounded to whole pairs where the file does not say.
        quant_methods: quantization_config.quant_method values whose weights are read.
        names: a field's own name(s) in this type's files, before the usual one.
        required: fields that a flat config.json must have.
    """

    model_type: str
    window_rule: Literal["none", "every", "opt_in", "pattern"]
    bias_rule: Literal["none", "flags", "attention_flag", "qkv", "everywhere"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    max_position_embeddings: int
    head_dim: int | None = None
    norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    has_rope: bool = True
    rope_theta: float = 10_000.0
    rope_local_base_freq: float | None = None
    sliding_window: int | None = None
    query_pre_attn_scalar: float | None = None
    sliding_window_pattern: int = 6
    attention_bias: bool = False
    rope_scaling: Mapping[str, str | float] | None = None
    yarn_truncate: bool = True
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    quant_methods: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    required: tuple[str, ...] = SIZES

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names under which this type's files may hold a field, preferred first."""
        return (*self.names.get(name, ()), name)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return the default of "bos_token_id" or "eos_token_id" as a tuple."""
        if name == "eos_token_id":
            return self.eos_token_ids
        return () if self.bos_token_id is None else (self.bos_token_id,)


LLAMA = ClassDefaults(
    model_type="llama",
    window_rule="none",
    bias_rule="flags",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_ids=(2,),
)
MISTRAL = ClassDefaults(
    model_type="mistral",
    window_rule="every",
    bias_rule="none",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
    bos_token_id=1,
    eos_token_ids=(2,),
    sliding_window=4096,
)
QWEN2 = ClassDefaults(
    model_type="qwen2",
    window_rule="opt_in",
    bias_rule="qkv",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=22_016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=32_768,
    sliding_window=4096,
)
QWEN3 = ClassDefaults(
    model_type="qwen3",
    window_rule="opt_in",
    bias_rule="attention_flag",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=22_016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=32_768,
    head_dim=128,
    sliding_window=4096,
)
GEMMA3_TEXT = ClassDefaults(
    model_type="gemma3_text",
    window_rule="pattern",
    bias_rule="attention_flag",
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=131_072,
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_ids=(1,),
    rope_theta=1_000_000.0,
    rope_local_base_freq=10_000.0,
    sliding_window=4096,
    query_pre_attn_scalar=256.0,
    names={"hidden_act": ("hidden_activation",), "sliding_window_pattern": ("_sliding_window_pattern",)},
    required=("hidden_size", "intermediate_size", "num_hidden_layers"),
)
GPT2 = ClassDefaults(
    model_type="gpt2",
    window_rule="none",
    bias_rule="everywhere",
    vocab_size=50_257,
    hidden_size=768,
    intermediate_size=None,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=None,
    max_position_embeddings=1024,
    norm_eps=1e-5,
    hidden_act="gelu_new",
    tie_word_embeddings=True,
    bos_token_id=50_256,
    eos_token_ids=(50_256,),
    has_rope=False,
    names={
        "hidden_size": ("n_embd",),
        "intermediate_size": ("n_inner",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "max_position_embeddings": ("n_positions", "n_ctx"),
        "hidden_act": ("activation_function",),
    },
    required=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
)
BITNET = ClassDefaults(
    model_type="bitnet",
    window_rule="none",
    bias_rule="attention_flag",
    vocab_size=128_256,
    hidden_size=2560,
    intermediate_size=6912,
    num_hidden_layers=30,
    num_attention_heads=20,
    num_key_value_heads=5,
    max_position_embeddings=2048,
    norm_eps=1e-5,
    hidden_act="relu2",
    bos_token_id=128_000,
    eos_token_ids=(128_001,),
    rope_theta=500_000.0,
)

GPT_OSS = ClassDefaults(
    model_type="gpt_oss",
    window_rule="pattern",
    bias_rule="attention_flag",
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
    head_dim=64,
    norm_eps=1e-5,
    rope_theta=150_000.0,
    sliding_window=128,
    sliding_window_pattern=2,
    attention_bias=True,
    rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    yarn_truncate=False,  # openai/gpt-oss, gpt_oss/torch/model.py, rounds nothing
    num_local_experts=128,
    num_experts_per_tok=4,
    swiglu_limit=7.0,
    swiglu_alpha=1.702,
    quant_methods=("mxfp4",),
)

CLASS_DEFAULTS: Mapping[str, ClassDefaults] = {
    defaults.model_type: defaults for defaults in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3_TEXT, GPT2, GPT_OSS, BITNET)
}
NESTED_TYPES: Mapping[str, str] = {"gemma3": "gemma3_text"}
"""Multimodal model types whose language model is described by their text_config, and that config's own type."""

LAYER_TYPES = ("sliding_attention", "full_attention")
