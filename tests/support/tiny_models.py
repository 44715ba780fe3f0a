"""Small random models of every family, built by transformers: what whole-model tests are compared with.

Everything that a mistake could hide behind is random and far from neutral: norm weights, biases, embeddings. Matrices
keep activations near one, so that logits are of order one and an absolute tolerance means something.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

VOCAB = 96
WINDOW = 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # short, so that all three bands of wavelengths occur
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "max_position_embeddings": 512}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GEMMA_TEXT = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "num_hidden_layers": 5,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": GEMMA_ROPE,
    **NO_TOKENS,
}
GEMMA2 = {
    **SIZES,
    **GQA,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "num_hidden_layers": 5,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
    **NO_TOKENS,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [2.0 + 0.7 * pair for pair in range(6)],
}
PHI3 = {  # three quarters of a head rotate; no context is above the original one, so that short_factor counts
    **SIZES,
    **GQA,
    "num_hidden_layers": 3,
    "original_max_position_embeddings": 512,
    "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75, "factor": 4.0},
    "tie_word_embeddings": True,
    **NO_TOKENS,
}
GPT_OSS = {
    **SIZES,
    **GQA,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "sliding_window": WINDOW,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.8,
    "swiglu_alpha": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,  # short, so that the ramp lies inside the pairs
    },
    **NO_TOKENS,
}
QWEN3_MOE = {
    **SIZES,
    **GQA,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    **NO_TOKENS,
}
QWEN3_NEXT = {
    **SIZES,
    **GQA,
    "num_hidden_layers": 5,
    "head_dim": 32,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    **NO_TOKENS,
}
QWEN3_5 = {name: size for name, size in QWEN3_NEXT.items() if "expert" not in name and name != "norm_topk_prob"}
QWEN3_5_MOE = {name: size for name, size in QWEN3_NEXT.items() if name not in ("norm_topk_prob", "intermediate_size")}
LFM2 = {
    **SIZES,
    **GQA,
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
    "conv_L_cache": 3,
    "block_multiple_of": 16,
    "tie_word_embeddings": True,
    **NO_TOKENS,
}
LFM2_MOE = {
    **{name: value for name, value in LFM2.items() if name != "block_multiple_of"},
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
GEMMA4_TEXT = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "global_head_dim": 40,
    "num_hidden_layers": 7,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    + 2 * ["sliding_attention"]
    + ["full_attention"],
    "final_logit_softcapping": 3.0,
    **NO_TOKENS,
    "pad_token_id": 0,
}
GEMMA4 = {  # features of layers, and the last layers share keys and values
    **GEMMA4_TEXT,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
GEMMA4_DENSE = {  # full layers have fewer kv heads, and their keys are their values
    **GEMMA4_TEXT,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
GEMMA4_MOE = {
    **GEMMA4_DENSE,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 48,
}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 12,  # short, so that queries of a test have several factors
    "llama_4_scaling_beta": 0.4,
}
MINISTRAL3 = {
    **SIZES,
    **GQA,
    "num_hidden_layers": 3,
    "head_dim": 24,
    "rope_parameters": MINISTRAL_ROPE,
    "tie_word_embeddings": False,
    **NO_TOKENS,
}
MIXTRAL = {
    **SIZES,
    **GQA,
    "num_hidden_layers": 3,
    "head_dim": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "tie_word_embeddings": False,
    **NO_TOKENS,
}
GRANITE = {
    **SIZES,
    **GQA,
    "num_hidden_layers": 3,
    "embedding_multiplier": 3.5,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
    "rms_norm_eps": 1e-5,
    **NO_TOKENS,
}
SMOLLM3 = {**SIZES, **GQA, "num_hidden_layers": 5, "no_rope_layer_interval": 2, **NO_TOKENS}
GLM4_MOE = {  # groups of experts, two of three for a token
    **SIZES,
    **GQA,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    **NO_TOKENS,
}
GLM4_MOE_AIR = {**GLM4_MOE, "use_qk_norm": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
GLM4 = {**SIZES, **GQA, "num_hidden_layers": 3, "head_dim": 24, "tie_word_embeddings": False, **NO_TOKENS}
OLMO2 = {**SIZES, **GQA, "num_hidden_layers": 3, "tie_word_embeddings": False, **NO_TOKENS}
OLMO3 = {
    **OLMO2,
    "num_hidden_layers": 5,  # every fourth is full
    "sliding_window": WINDOW,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,  # short, so that the ramp lies inside the pairs
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
EXAONE4 = {**OLMO3, "sliding_window_pattern": 4, "head_dim": 24, "rope_parameters": LLAMA3_ROPE}
EXAONE4_FULL = {**EXAONE4, "head_dim": 16, "sliding_window": None, "layer_types": 5 * ["full_attention"]}
LATENT = {  # widths that a quantised cache can keep: 32 of 96 features rotate
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 40,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "tie_word_embeddings": False,
    **NO_TOKENS,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
DEEPSEEK_V2 = {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1}
DEEPSEEK_V2_GROUPS = {
    **LATENT,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.0,
    "attention_bias": True,
    "rope_parameters": LATENT_YARN,
}
DEEPSEEK_V3 = {
    **LATENT,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "rope_parameters": LATENT_YARN,
}
DEEPSEEK_V3_ODD = {  # widths of no vector, halves instead of pairs, YaRN's factors of cosines and of scores apart
    **DEEPSEEK_V3,
    "hidden_size": 60,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 36,
    "rope_interleave": False,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rope_parameters": {**LATENT_YARN, "mscale_all_dim": 1.3, "beta_fast": 4.0},
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def llama(**changes: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **GQA, "num_hidden_layers": 3, **NO_TOKENS, **changes}))


def llama3(**changes: object) -> nn.Module:
    """Return a Llama model with Llama 3's rope scaling, untied; `changes` are of its sizes."""
    return llama(**{"head_dim": 24, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False, **changes})


def _llama_biased() -> nn.Module:
    return llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=4)


def mistral(**changes: object) -> nn.Module:
    """Return a Mistral model in which every layer slides; `changes` are of its sizes."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {**SIZES, **GQA, "num_hidden_layers": 3, "sliding_window": WINDOW, "head_dim": 32}
    return MistralForCausalLM(MistralConfig(**{**sizes, **NO_TOKENS, **changes}))


def ministral3(**changes: object) -> nn.Module:
    """Return a Ministral 3 model; `changes` are of MINISTRAL3."""
    from transformers import Ministral3Config, Ministral3ForCausalLM

    return Ministral3ForCausalLM(Ministral3Config(**{**MINISTRAL3, **changes}))


def _ministral3_sliding() -> nn.Module:
    rope = {**MINISTRAL_ROPE, "rope_type": "default", "original_max_position_embeddings": 5}
    return ministral3(
        rope_parameters=rope, sliding_window=WINDOW, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True
    )


def mistral3(text: dict[str, object]) -> nn.Module:
    """Return a multimodal Mistral model with this text model, which has a model_type."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    vision = {**VISION, "model_type": "pixtral", "head_dim": 8}
    tied = bool(text["tie_word_embeddings"])
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    )


def _mistral3_nested() -> nn.Module:
    text = {**SIZES, **GQA, "num_hidden_layers": 2, "head_dim": 24, "sliding_window": None, **NO_TOKENS}
    return mistral3({**text, "model_type": "mistral", "tie_word_embeddings": False})


def _ministral3_nested() -> nn.Module:
    return mistral3({**MINISTRAL3, "model_type": "ministral3", "num_hidden_layers": 2, "tie_word_embeddings": True})


def mixtral(**changes: object) -> nn.Module:
    """Return a Mixtral model; `changes` are of MIXTRAL."""
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(**{**MIXTRAL, **changes}))
    model.set_experts_implementation("eager")  # transformers' grouped product takes no odd sizes
    return model


def granite(**changes: object) -> nn.Module:
    """Return a dense Granite model; `changes` are of GRANITE."""
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**{**GRANITE, "tie_word_embeddings": True, **changes}))


def _granite_biased() -> nn.Module:
    return granite(attention_bias=True, mlp_bias=True, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE)


def granite_moe(**changes: object) -> nn.Module:
    """Return a Granite mixture of experts; `changes` are of GRANITE."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    experts = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "tie_word_embeddings": True}
    model = GraniteMoeForCausalLM(GraniteMoeConfig(**{**GRANITE, **experts, **changes}))
    model.set_experts_implementation("eager")
    return model


def smollm3(**changes: object) -> nn.Module:
    """Return a SmolLM3 model; `changes` are of SMOLLM3."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    return SmolLM3ForCausalLM(SmolLM3Config(**{**SMOLLM3, "tie_word_embeddings": True, **changes}))


def _smollm3_sliding() -> nn.Module:
    windows = {"use_sliding_window": True, "sliding_window": WINDOW}
    return smollm3(no_rope_layers=[0, 1, 1, 0, 1], tie_word_embeddings=False, **windows)


def qwen2(**changes: object) -> nn.Module:
    """Return a Qwen 2 model, untied; `changes` are of its sizes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {**SIZES, **GQA, "num_hidden_layers": 3, "tie_word_embeddings": False}
    return Qwen2ForCausalLM(Qwen2Config(**{**sizes, **NO_TOKENS, **changes}))


def _qwen2_sliding() -> nn.Module:
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return qwen2(tie_word_embeddings=True, **windows)


def qwen3(**changes: object) -> nn.Module:
    """Return a Qwen 3 model, tied; `changes` are of its sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**SIZES, **GQA, "num_hidden_layers": 3, "head_dim": 32, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **NO_TOKENS, **changes}))


def phi3(**changes: object) -> nn.Module:
    """Return a Phi 3 model; `changes` are of PHI3."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**{**PHI3, **changes}))


def _phi3_sliding() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return phi3(sliding_window=WINDOW, num_key_value_heads=4, rope_parameters=rope, tie_word_embeddings=False)


def starcoder2(**changes: object) -> nn.Module:
    """Return a StarCoder 2 model; `changes` are of its sizes."""
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "sliding_window": WINDOW}
    return Starcoder2ForCausalLM(Starcoder2Config(**{**SIZES, **heads, **NO_TOKENS, **changes}))


def stablelm(**changes: object) -> nn.Module:
    """Return a StableLM model; `changes` are of its sizes."""
    from transformers import StableLmConfig, StableLmForCausalLM

    sizes = {**SIZES, **GQA, "num_hidden_layers": 3, "use_qkv_bias": True}
    return StableLmForCausalLM(StableLmConfig(**{**sizes, **NO_TOKENS, **changes}))


def gemma(**changes: object) -> nn.Module:
    """Return a Gemma 1 model with one kv head; `changes` are of its sizes."""
    from transformers import GemmaConfig, GemmaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24, "num_hidden_layers": 3}
    model = GemmaForCausalLM(GemmaConfig(**{**SIZES, **heads, **NO_TOKENS, **changes}))
    model.config.hidden_act = "gelu"  # in the file; some versions of transformers would compute it exactly
    return model


def gemma2(**changes: object) -> nn.Module:
    """Return a Gemma 2 model; `changes` are of GEMMA2."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**{**GEMMA2, **changes}))


def _gemma2_uncapped() -> nn.Module:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    changes = {"layer_types": types, "num_hidden_layers": 3, "attention_bias": True, "tie_word_embeddings": False}
    return gemma2(attn_logit_softcapping=None, final_logit_softcapping=None, **changes)


def gemma3(**changes: object) -> nn.Module:
    """Return a Gemma 3 text model; `changes` are of GEMMA_TEXT."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**{**GEMMA_TEXT, **changes}))


def _gemma3_nested() -> nn.Module:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=GEMMA_TEXT, vision_config=VISION, mm_tokens_per_image=4)
    )


def gemma4(**changes: object) -> nn.Module:
    """Return a Gemma 4 model; `changes` are of GEMMA4."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    model = Gemma4ForCausalLM(Gemma4TextConfig(**{**GEMMA4, **changes}))
    _tame(model)
    model.set_experts_implementation("eager")  # transformers' grouped product takes no odd sizes
    return model


@torch.no_grad()
def _tame(model: nn.Module) -> None:
    """Draw the layers' numbers, and keep scores near one, which Gemma 4 leaves to the norms of queries and keys."""
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.4, 1.4)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.fill_(parameter.numel() ** -0.25)


def _gemma4_dense() -> nn.Module:
    return gemma4(**GEMMA4_DENSE)


def _gemma4_moe() -> nn.Module:
    return gemma4(**GEMMA4_MOE)


def _gemma4_unified() -> nn.Module:
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    model = Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**{**GEMMA4_DENSE, "num_kv_shared_layers": 2}))
    _tame(model)
    return model


def gpt2(**changes: object) -> nn.Module:
    """Return a GPT-2 model; `changes` are of its sizes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_positions": 512, "n_embd": 64, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **NO_TOKENS, **changes}))


def gpt_oss(**changes: object) -> nn.Module:
    """Return a gpt-oss model; `changes` are of GPT_OSS."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = {**GPT_OSS, **changes}
    model = GptOssForCausalLM(GptOssConfig(**config))
    for module in model.modules():
        if isinstance(module, GptOssExperts):  # transformers 5.17 reads neither from its config, 5.23 both
            module.limit, module.alpha = config["swiglu_limit"], config["swiglu_alpha"]
    return model


def qwen3_moe(**changes: object) -> nn.Module:
    """Return a Qwen 3 mixture of experts; `changes` are of QWEN3_MOE."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**QWEN3_MOE, **changes}))
    model.set_experts_implementation("eager")  # transformers' grouped product takes no odd sizes
    return model


@torch.no_grad()
def remembering(model: nn.Module) -> nn.Module:
    """Return the model with delta rules that forget half of their state in about three tokens.

    As transformers initialises them most heads forget all in one. What such a head reads is a single product of query
    and key, which is often close to 0, and its norm then magnifies rounding: transformers' own float32 logits are off
    by 2e-4.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(-2.0)
    return model


def qwen3_next(**changes: object) -> nn.Module:
    """Return a Qwen 3 Next model; `changes` are of QWEN3_NEXT."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    model = remembering(Qwen3NextForCausalLM(Qwen3NextConfig(**{**QWEN3_NEXT, **changes})))
    model.set_experts_implementation("eager")  # transformers' grouped product takes no odd sizes
    return model


def qwen3_5(**changes: object) -> nn.Module:
    """Return a dense Qwen 3.5 model; `changes` are of QWEN3_5."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return remembering(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**QWEN3_5, **changes})))


def qwen3_5_moe(**changes: object) -> nn.Module:
    """Return a Qwen 3.5 mixture of experts; `changes` are of QWEN3_5_MOE."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    model = remembering(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**QWEN3_5_MOE, **changes})))
    model.set_experts_implementation("eager")
    return model


def lfm2(**changes: object) -> nn.Module:
    """Return an LFM2 model; `changes` are of LFM2."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM(Lfm2Config(**{**LFM2, **changes}))


def _lfm2_biased() -> nn.Module:
    sizes = {"block_auto_adjust_ff_dim": False, "head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": False}
    layers = {"layer_types": None, "full_attn_idxs": [0, 2], "num_hidden_layers": 4, "conv_L_cache": 5}
    return lfm2(**sizes, **layers, conv_bias=True)


@torch.no_grad()
def lfm2_moe(**changes: object) -> nn.Module:
    """Return an LFM2 mixture of experts; `changes` are of LFM2_MOE."""
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    model = Lfm2MoeForCausalLM(Lfm2MoeConfig(**{**LFM2_MOE, **changes}))
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.uniform_(-0.4, 0.4)
    model.set_experts_implementation("eager")  # transformers' grouped product takes no odd sizes
    return model


@torch.no_grad()
def with_selection_biases(model: nn.Module) -> nn.Module:
    """Return the mixture with random selection biases, which transformers sets to zero."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.4, 0.4)
    model.set_experts_implementation("eager")  # transformers' grouped product takes no odd sizes
    return model


def glm4_moe(**changes: object) -> nn.Module:
    """Return a GLM 4.5 model; `changes` are of GLM4_MOE."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    return with_selection_biases(Glm4MoeForCausalLM(Glm4MoeConfig(**{**GLM4_MOE, **changes})))


def _glm4_moe_air() -> nn.Module:
    return glm4_moe(**GLM4_MOE_AIR)


def glm4(**changes: object) -> nn.Module:
    """Return a GLM 4 0414 model; `changes` are of GLM4."""
    from transformers import Glm4Config, Glm4ForCausalLM

    return Glm4ForCausalLM(Glm4Config(**{**GLM4, **changes}))


def glm(**changes: object) -> nn.Module:
    """Return a GLM 4 9B model; `changes` are of GLM4."""
    from transformers import GlmConfig, GlmForCausalLM

    return GlmForCausalLM(GlmConfig(**{**GLM4, "head_dim": 16, **changes}))


def olmo2(**changes: object) -> nn.Module:
    """Return an OLMo 2 model; `changes` are of OLMO2."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**{**OLMO2, **changes}))


def olmo3(**changes: object) -> nn.Module:
    """Return an OLMo 3 model; `changes` are of OLMO3."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    return Olmo3ForCausalLM(Olmo3Config(**{**OLMO3, **changes}))


def exaone4(**changes: object) -> nn.Module:
    """Return an EXAONE 4 model; `changes` are of EXAONE4."""
    from transformers import Exaone4Config, Exaone4ForCausalLM

    return Exaone4ForCausalLM(Exaone4Config(**{**EXAONE4, **changes}))


def _exaone4_full() -> nn.Module:
    return exaone4(**EXAONE4_FULL)


def deepseek_v2(**changes: object) -> nn.Module:
    """Return a DeepSeek V2 model; `changes` are of DEEPSEEK_V2."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return with_selection_biases(DeepseekV2ForCausalLM(DeepseekV2Config(**{**DEEPSEEK_V2, **changes})))


def _deepseek_v2_groups() -> nn.Module:
    return deepseek_v2(**DEEPSEEK_V2_GROUPS)


def deepseek_v3(**changes: object) -> nn.Module:
    """Return a DeepSeek V3 model; `changes` are of DEEPSEEK_V3."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return with_selection_biases(DeepseekV3ForCausalLM(DeepseekV3Config(**{**DEEPSEEK_V3, **changes})))


def _deepseek_v3_odd() -> nn.Module:
    return deepseek_v3(**DEEPSEEK_V3_ODD)


def glm4_moe_lite(**changes: object) -> nn.Module:
    """Return a GLM 4.7 Flash model; `changes` are of LATENT."""
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

    return with_selection_biases(Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**{**LATENT, **changes})))


def _bitnet(**changes: object) -> nn.Module:
    from transformers import BitNetConfig, BitNetForCausalLM

    sizes = {**SIZES, **GQA, "num_hidden_layers": 3, "tie_word_embeddings": True}
    return BitNetForCausalLM(BitNetConfig(**{**sizes, **NO_TOKENS, **changes}))


BUILDERS: Mapping[str, Callable[..., nn.Module]] = {
    "llama3": llama3,  # llama3 rope scaling, head_dim other than hidden / heads, GQA, untied
    "llama_biased": _llama_biased,  # biases everywhere, tied, no GQA
    "mistral": mistral,  # every layer slides
    "qwen2": qwen2,  # qkv bias, untied
    "qwen2_sliding": _qwen2_sliding,  # full layers first, then sliding ones
    "qwen3": qwen3,  # q and k norms, tied
    "phi3": phi3,  # fused projections, heads that rotate in part, longrope
    "phi3_sliding": _phi3_sliding,  # every layer slides, no GQA, untied
    "starcoder2": starcoder2,  # LayerNorm and rotation, biases everywhere, an MLP without a gate, a window
    "starcoder2_plain": lambda: starcoder2(  # no biases, full attention, one kv head, untied
        use_bias=False, sliding_window=None, num_key_value_heads=1, tie_word_embeddings=False
    ),
    "stablelm": stablelm,  # LayerNorm, heads that rotate in part, biases of q, k and v
    "stablelm_plain": lambda: stablelm(  # no biases, another share, tied
        use_qkv_bias=False, partial_rotary_factor=0.5, tie_word_embeddings=True, num_key_value_heads=4
    ),
    "gemma": gemma,  # scaled embeddings, norms of 1 + w, one kv head, "gelu" that stands for its tanh form
    "gemma2": gemma2,  # capped scores and logits, every other layer slides, sandwich norms
    "gemma2_uncapped": _gemma2_uncapped,  # no caps, biases, untied, layer types that are listed
    "gemma3": gemma3,  # sliding and full layers, linear rope scaling on the full ones
    "gemma3_nested": _gemma3_nested,  # the same inside a multimodal model
    "gemma4": gemma4,  # features of layers, shared keys and values, two head widths, a wide MLP in sharing layers
    "gemma4_dense": _gemma4_dense,  # keys that are values, fewer kv heads in full layers
    "gemma4_moe": _gemma4_moe,  # experts beside the MLP
    "gemma4_unified": _gemma4_unified,  # the names of another class, layers that share keys that are values
    "gpt2": gpt2,
    "gpt_oss": gpt_oss,  # sinks, every other layer slides, YaRN, experts whose activation is clamped often
    "qwen3_moe": qwen3_moe,  # experts in every layer, q and k norms
    "qwen3_next": qwen3_next,  # delta rules, inputs fused by key head, gated attention, a shared expert
    "qwen3_5": qwen3_5,  # delta rules and gated attention, dense
    "qwen3_5_moe": qwen3_5_moe,  # the same with experts and a shared expert
    "lfm2": lfm2,  # gated short convolutions beside attention, an MLP whose width is computed, tied
    "lfm2_biased": _lfm2_biased,  # biases of wider convolutions, one kv head, attention first, untied
    "lfm2_moe": lfm2_moe,  # experts chosen by sigmoid scores and a bias, after a dense layer
    "glm4_moe": glm4_moe,  # experts chosen by sigmoid scores within groups, a shared one, half of a head rotates
    "glm4_moe_air": _glm4_moe_air,  # the same without groups and norms of q and k, two shared experts
    "glm4": glm4,  # sandwich norms, adjacent features of half a head rotate, fused gate and up
    "glm": glm,  # the same without norms behind the sublayers
    "olmo2": olmo2,  # norms behind the sublayers alone, and of q and k over all heads
    "olmo3": olmo3,  # the same, three of four layers slide, YaRN on the full ones
    "exaone4": exaone4,  # norms behind the sublayers, full layers do not rotate, sliding ones as Llama 3
    "exaone4_full": _exaone4_full,  # without a window, where full layers rotate
    "deepseek_v2": deepseek_v2,  # latent attention, experts by a softmax, queries of one projection
    "deepseek_v2_groups": _deepseek_v2_groups,  # groups ranked by their best expert, compressed queries, biases, YaRN
    "deepseek_v3": deepseek_v3,  # latent attention, experts by sigmoids within groups, YaRN
    "deepseek_v3_odd": _deepseek_v3_odd,  # the same with odd widths, rotated halves, biases, tied
    "glm4_moe_lite": glm4_moe_lite,  # latent attention, GLM's experts
    "bitnet": _bitnet,  # its block with plain weights; ternary ones are in ternary_files.py
    "ministral3": ministral3,  # YaRN without a factor of cosines, queries scaled by position, untied
    "ministral3_sliding": _ministral3_sliding,  # the scale without YaRN, a window, one key head, tied
    "mistral3_nested": _mistral3_nested,  # Mistral inside a multimodal model, untied
    "ministral3_nested": _ministral3_nested,  # Ministral 3 inside it, tied
    "mixtral": mixtral,  # experts in every layer, whose files name them w1, w2 and w3
    "granite": granite,  # factors of embeddings, scores, sublayers and logits, tied
    "granite_biased": _granite_biased,  # the same with biases, which the factors multiply, too
    "granite_moe": granite_moe,  # experts with the factor of sublayers
    "smollm3": smollm3,  # every other layer does not rotate
    "smollm3_sliding": _smollm3_sliding,  # layers that do not rotate slide instead
}
ARCHITECTURES = (  # one of each
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "phi3",
    "starcoder2",
    "stablelm",
    "gpt_oss",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma4",
    "gemma4_moe",
    "glm4_moe",
    "glm4",
    "glm",
    "olmo2",
    "olmo3",
    "exaone4",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "bitnet",
    "lfm2",
    "lfm2_moe",
    "ministral3",
    "mixtral",
    "granite",
    "granite_moe",
    "smollm3",
)
# Decoded compiled alone, too. A graph for one sequence is that for several with another number in its shapes, and
# one sequence that could run native or as a GPU's kernels does not run it.
AT_BOTH_WIDTHS = ("gemma3", "gpt_oss")


LATENT_ATTENTION = ("deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_odd", "glm4_moe_lite")
MIXTURES = (
    *("gpt_oss", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "gemma4_moe", "glm4_moe", "glm4_moe_air", "lfm2_moe"),
    *("mixtral", "granite_moe", *LATENT_ATTENTION),
)
DELTA_RULES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
RECURRENT = (*DELTA_RULES, "lfm2", "lfm2_moe")  # layers with a state and layers that attend
TOLERANCE = 2e-5
# transformers' own float32 logits differ from float64 by up to 9e-5 with these, whose norms divide small answers by
# their size.
TOLERANCE_WITH_DELTA_RULES = 1e-4
# Gemma 4 does not scale its scores, so that rounding moves a random model's softmax more: transformers' own float32
# logits differ by as much from its float64 ones.
TOLERANCE_OF_SCORES = 1e-4


def tolerance_of(name: str) -> float:
    """Return the largest difference between two float32 logits of a family's model that rounding explains."""
    if name.startswith("gemma4"):
        return TOLERANCE_OF_SCORES
    return TOLERANCE_WITH_DELTA_RULES if name in DELTA_RULES else TOLERANCE


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint folder and the transformers model that it was saved from.

    Attributes:
        reference: float32, eager attention.
    """

    name: str
    folder: Path
    reference: nn.Module

    @cached_property
    def ids(self) -> Tensor:
        """Two sequences of 50 tokens: longer than the window, than any prefill chunk in use, and no multiple of it."""
        return torch.randint(0, VOCAB, (2, 50), generator=torch.Generator().manual_seed(5))

    @cached_property
    def logits(self) -> Tensor:
        """transformers' float32 logits of `ids`: [2, 50, V]."""
        return self.logits_of(self.ids)

    @torch.inference_mode(mode=False)  # as `save_tiny`
    @torch.no_grad()
    def logits_of(self, ids: Tensor) -> Tensor:
        """Return transformers' float32 logits, [B, T, V]."""
        return self.reference(input_ids=ids, use_cache=False).logits.float()

    @torch.no_grad()
    def hidden_states(self) -> tuple[Tensor, ...]:
        """Return transformers' hidden states of `ids`, the last one after the final norm: [2, 50, D] each."""
        output = self.reference(input_ids=self.ids, use_cache=False, output_hidden_states=True)
        return tuple(output.hidden_states)


def build_reference(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """Return a family's model with random weights, float32, eager attention, ready to run.

    Args:
        changes: settings of the family's config, for the builders that take them.
    """
    torch.manual_seed(seed)
    model = BUILDERS[name](**changes)
    randomise(model, seed)
    model.set_attn_implementation("eager")
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter anew: matrices keep variance, norms and biases vary by 0.3 around what they were."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.empty_like(parameter).normal_(generator=generator))
        else:
            parameter.normal_(generator=generator).div_(parameter.shape[-1] ** 0.5)


@torch.inference_mode(mode=False)  # in which Phi 3 would have frequencies that a later call must not change
def save_tiny(name: str, folder: Path) -> TinyModel:
    """Save a family's model as transformers does and return it with its folder."""
    reference = build_reference(name)
    reference.save_pretrained(folder)
    return TinyModel(name, folder, reference)


def add_tokenizer(folder: Path, adds_bos: bool = False) -> None:
    """Give a checkpoint folder a tokenizer: a token per printable ASCII character, and the special "<|end|>" (0)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    characters = ["\u0120", *map(chr, range(33, 127))]  # byte-level BPE writes the space as U+0120
    vocab = {"<|end|>": 0} | {character: at for at, character in enumerate(characters, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
