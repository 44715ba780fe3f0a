"""Small whole files of each kind, which the fuzzer damages: a Llama of one layer, with text in it, in either form.

Of Qwen 3.5 and Gemma 4, whose settings differ by layer, there are configs and packed GGUF files without text.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.export.pack import Packer
from graphcore.progress import ignore_progress

DIM, HIDDEN, VOCAB = 32, 64, 300
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": [1],
}
GEMMA = {
    **{name: value for name, value in CONFIG.items() if name not in ("architectures", "rope_scaling", "hidden_act")},
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 10000.0,
}
GPT_OSS = {
    **{name: value for name, value in CONFIG.items() if name not in ("architectures", "hidden_act")},
    "model_type": "gpt_oss",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "swiglu_limit": 7.0,
    "layer_types": ["full_attention"],
    "sliding_window": 8,
    "quantization_config": {"quant_method": "mxfp4"},
}
NESTED = {"model_type": "gemma3", "text_config": GEMMA, "vision_config": {"hidden_size": 8}}
PLAIN = {name: CONFIG[name] for name in ("hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps")}
QWEN3_5 = {
    **PLAIN,
    "model_type": "qwen3_5_text",
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 64,
}
QWEN3_5_MOE = {
    **{name: value for name, value in QWEN3_5.items() if name != "intermediate_size"},
    "model_type": "qwen3_5_moe_text",
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GEMMA4 = {
    **PLAIN,
    "model_type": "gemma4_text",
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 64,
}
GEMMA4_MOE = {
    **GEMMA4,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 2,
    "top_k_experts": 1,
    "moe_intermediate_size": 32,
}
NESTED_QWEN = {"model_type": "qwen3_5", "text_config": QWEN3_5, "vision_config": {"hidden_size": 8}}
BY_LAYER = (QWEN3_5, QWEN3_5_MOE, GEMMA4, GEMMA4_MOE)
CONFIGS = (CONFIG, GEMMA, GPT_OSS, NESTED, *BY_LAYER, NESTED_QWEN)
TEMPLATES = (
    "{% for message in messages %}{{ message['role'] + ': ' + message.content | trim }}\n{% endfor %}",
    "{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
    "{{ bos_token }}{{ m | tojson }}{% generation %}{{ m.content.split('x')[-1].lstrip() }}{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' ~ strftime_now('%d %b') }}{% endif %}",
    "{% set ns = namespace(n=0, t='') %}{% macro f(x, y=2) %}{{ x * y }}{% endmacro %}{% for i in range(3) %}"
    "{% set ns.n = ns.n + i %}{% set ns.t = ns.t ~ f('a' * i) %}{% if i > 1 %}{% break %}{% endif %}{% endfor %}"
    "{{ ns.t | upper | replace('A', 'b') }}{{ {'a': [1, 2.5, none]} | tojson(indent=2) }}{{ '%5d' | format(ns.n) }}",
)
MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("a", "n")]
SPECIAL = ("<|end|>", "<|bos|>")


def byte_letters() -> list[str]:
    """Return the 256 letters that byte-level vocabularies spell bytes with."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> list[str]:
    """Return as many spellings as the config has ids."""
    known = [*SPECIAL, *byte_letters(), *("".join(merge) for merge in MERGES)]
    return [*known, *(f"[PAD{index}]" for index in range(VOCAB - len(known)))]


def tensors() -> dict[str, np.ndarray]:
    """Return the weights by Hugging Face's names, [out, in] float32."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, DIM),
        "model.layers.0.input_layernorm.weight": (DIM,),
        "model.layers.0.self_attn.q_proj.weight": (DIM, DIM),
        "model.layers.0.self_attn.k_proj.weight": (16, DIM),
        "model.layers.0.self_attn.v_proj.weight": (16, DIM),
        "model.layers.0.self_attn.o_proj.weight": (DIM, DIM),
        "model.layers.0.post_attention_layernorm.weight": (DIM,),
        "model.layers.0.mlp.gate_proj.weight": (HIDDEN, DIM),
        "model.layers.0.mlp.up_proj.weight": (HIDDEN, DIM),
        "model.layers.0.mlp.down_proj.weight": (DIM, HIDDEN),
        "model.norm.weight": (DIM,),
        "lm_head.weight": (VOCAB, DIM),
    }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def safetensors_bytes(stored: Mapping[str, np.ndarray]) -> bytes:
    """Return a safetensors file."""
    return save(dict(stored), {"format": "pt"})


def packed_bytes(folder: Path, config: Mapping[str, object]) -> bytes:
    """Return a GGUF file of random packed weights, without a vocabulary, as `task=pack` writes it."""
    settings = compose_settings(["model=qwen3_5", "model.checkpoint=random:"]).model
    settings.random_config = dict(config)
    path = folder / "packed.gguf"
    for _ in Packer(open_model(settings, 0, folder, ignore_progress), "q8_0").pack(path, ignore_progress):
        pass
    content = path.read_bytes()
    path.unlink()
    return content


def gguf_bytes(folder: Path, tokenizer: str) -> bytes:
    """Return a GGUF file with a vocabulary, a chat template, packed matrices and `rope_freqs.weight`.

    Args:
        folder: where it may lie for a moment.
        tokenizer: value of `tokenizer.ggml.model`: "gpt2", "llama" or "gemma4".
    """
    path = folder / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(300)
    is_spm = tokenizer != "gpt2"
    texts = spm_vocabulary() if is_spm else vocabulary()
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(texts)
    writer.add_token_types([3, 3, 3, *[6] * 256, *[1] * 41] if is_spm else [3, 3, *[1] * 298])
    if tokenizer == "llama":
        writer.add_token_scores([-float(index) for index in range(300)])
    elif tokenizer == "gemma4":
        writer.add_token_merges(["t h", "h e", "a n"])
    else:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATES[0])
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    layer = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    for name, value in tensors().items():
        short = name.removeprefix("model.").removesuffix(".weight")
        ours = names[short] if short in names else f"blk.0.{layer[short.removeprefix('layers.0.')]}"
        if value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "ffn" in ours else gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(f"{ours}.weight", gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{ours}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    path.unlink()
    return content


def spm_vocabulary() -> list[str]:
    """Return spellings as SentencePiece has them: three special ones, the bytes, pieces."""
    pieces = ["\u2581", "\u2581the", "th", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", "an", "he"]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]


def tokenizer_json() -> bytes:
    """Return a byte-level tokenizer."""
    ids = {text: index for index, text in enumerate(vocabulary())}
    backend = Tokenizer(models.BPE(ids, MERGES))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(r"\d{1,3}", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="$A $B", special_tokens=[("<|bos|>", 1)]
    )
    return backend.to_str().encode()


def tokenizer_config() -> bytes:
    """Return a tokenizer_config.json with special tokens and a chat template."""
    return json.dumps(
        {
            "bos_token": "<|bos|>",
            "eos_token": {"content": "<|end|>", "lstrip": False},
            "added_tokens_decoder": {"0": {"content": "<|end|>", "special": True}, "1": {"content": "<|bos|>"}},
            "chat_template": [{"name": "default", "template": TEMPLATES[0]}],
            "model_max_length": 1e30,
        }
    ).encode()


def golden_blocks() -> dict[str, np.ndarray]:
    """Return libggml's own blocks of each format: [blocks, bytes] uint8."""
    stored = np.load(Path(__file__).parents[2] / "tests" / "golden" / "ggml_blocks.npz")
    return {name.removesuffix(".raw").lower(): stored[name] for name in stored.files if name.endswith(".raw")}
