"""gpt-oss from every form of its files gives transformers' logits, over sequences that wrap the rings several times.

    dense     Hugging Face, experts by input row, gate and up alternating, float32 or bf16
    mxfp4     Hugging Face, blocks and scales
    gguf      apart or fused (attn_qkv, ffn_gate_up_exps), experts float32 or MXFP4; written here with gguf-py

The model is transformers' own, with random weights; packed experts are random bytes that transformers' own code unpacks
into the reference. Tolerance as in test_model_parity.
"""

import json
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import GPT_OSS, VOCAB, randomise
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graphcore import Engine
from graphcore.errors import CheckpointError

TOLERANCE = 2e-5
SEEDS = (0, 1, 2)
LENGTH = 61  # the window is 8: rings wrap seven times
SIZES = ("prefill_chunk=16", "context_length=64", "batch_size=2")
PARTS = ("gate_up_proj", "down_proj")


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(**GPT_OSS))
    randomise(model, seed)
    model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def pack(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Give every expert random MXFP4 weights; return them as blocks and scales, by transformers' names."""
    generator = torch.Generator().manual_seed(seed)
    packed = {}
    for index, layer in enumerate(model.model.layers):
        for part in PARTS:
            parameter = getattr(layer.mlp.experts, part)  # [X, I, O]
            experts, inputs, outputs = parameter.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).byte()
            scales = torch.randint(121, 125, blocks.shape[:-1], generator=generator).byte()
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            name = f"model.layers.{index}.mlp.experts.{part}"
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed


def save_mxfp4(folder: Path, seed: int) -> nn.Module:
    """Save a checkpoint as openai's are and return the model."""
    model = build(seed)
    packed = pack(model, seed)
    model.save_pretrained(folder)
    dense = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in dense.items() if f"{name}_blocks" not in packed}
    save_file(kept | packed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def save_dense(folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build(seed)
    for parameter in model.parameters():  # and no buffer: the rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return model.float()


def ids_of(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100 + seed))


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


@torch.inference_mode()
def check(path: Path, model: nn.Module, seed: int, graph: str = "eager") -> None:
    """Compare one pass, and token by token after a prompt, with transformers."""
    ids = ids_of(seed)
    expected = logits_of(model, ids)
    with Engine.load(path, dtype="fp32", device="cpu", graph=graph, overrides=list(SIZES)) as engine:
        assert (engine.logits(ids) - expected).abs().max() < TOLERANCE
        row = ids[1].tolist()
        steps = [engine.runner.feed([row[:21]], [0])]
        steps += [engine.runner.feed([[token]], [at]) for at, token in enumerate(row[21:], start=21)]
        assert (torch.cat(steps) - expected[1, 20:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
def test_mxfp4_blocks_give_transformers_logits(seed: int, tmp_path: Path) -> None:
    check(tmp_path, save_mxfp4(tmp_path, seed), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", SEEDS)
def test_dense_experts_give_transformers_logits(seed: int, dtype: torch.dtype, tmp_path: Path) -> None:
    check(tmp_path, save_dense(tmp_path, seed, dtype), seed)


def test_compiled_mxfp4_blocks_give_transformers_logits(tmp_path: Path) -> None:
    check(tmp_path, save_mxfp4(tmp_path, 4), 4, "compiled")


def test_both_storage_forms_and_a_cut_model_agree_with_transformers_layer_by_layer(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path, 5)
    with torch.no_grad():
        expected = model(input_ids=ids_of(5), use_cache=False, output_hidden_states=True).hidden_states
    overrides = [*SIZES, "model.num_hidden_layers=3"]
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=overrides) as engine:
        _, hidden = engine.logits(ids_of(5), output_hidden_states=True)
    for found, wanted in zip(hidden, expected[:4], strict=True):
        assert (found - wanted).abs().max() < TOLERANCE


def ggml_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return rows of 17-byte blocks, [X, O, I/32 * 17]: written down from the definitions of both layouts."""
    codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], 32)
    both_halves = codes[..., :16] | codes[..., 16:] << 4
    rows = np.concatenate((scales[..., None], both_halves), axis=-1)
    return rows.reshape(*rows.shape[:2], -1)


def gguf_tensors(model: nn.Module, packed: dict[str, Tensor], is_fused: bool) -> dict[str, np.ndarray]:
    """Return llama.cpp's tensors: gate and up taken apart, or gate before up; q, k, v alone or in this order."""
    state = model.state_dict()
    found: dict[str, np.ndarray] = {}

    def put(name: str, stored: str) -> None:
        found[stored] = state[name].numpy()

    for name, stored in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        put(f"{name}.weight", f"{stored}.weight")
    for index in range(len(model.model.layers)):
        theirs, ours = f"model.layers.{index}.", f"blk.{index}."
        put(f"{theirs}input_layernorm.weight", f"{ours}attn_norm.weight")
        put(f"{theirs}post_attention_layernorm.weight", f"{ours}post_attention_norm.weight")
        put(f"{theirs}self_attn.sinks", f"{ours}attn_sinks.weight")
        for leaf in ("weight", "bias"):
            put(f"{theirs}mlp.router.{leaf}", f"{ours}ffn_gate_inp.{leaf}")
            put(f"{theirs}self_attn.o_proj.{leaf}", f"{ours}attn_output.{leaf}")
            for part in "qkv":
                put(f"{theirs}self_attn.{part}_proj.{leaf}", f"{ours}attn_{part}.{leaf}")
            if is_fused:
                found[f"{ours}attn_qkv.{leaf}"] = np.concatenate([found.pop(f"{ours}attn_{p}.{leaf}") for p in "qkv"])
        for part in PARTS:
            name = f"{theirs}mlp.experts.{part}"
            rows = state[name].mT.numpy()
            if packed:
                rows = ggml_blocks(packed[f"{name}_blocks"].numpy(), packed[f"{name}_scales"].numpy())
            for leaf, tensor in (("weight", rows), ("bias", state[f"{name}_bias"].numpy())):
                if part == "down_proj":
                    found[f"{ours}ffn_down_exps.{leaf}"] = tensor
                elif is_fused:
                    found[f"{ours}ffn_gate_up_exps.{leaf}"] = np.concatenate((tensor[:, ::2], tensor[:, 1::2]), axis=1)
                else:
                    found[f"{ours}ffn_gate_exps.{leaf}"] = tensor[:, ::2]
                    found[f"{ours}ffn_up_exps.{leaf}"] = tensor[:, 1::2]
    return found


def write_gguf(path: Path, model: nn.Module, tensors: dict[str, np.ndarray]) -> Path:
    """Write the keys that llama.cpp's converter writes, no more."""
    config, rope = model.config, model.config.rope_parameters
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_tokenizer_model("none")
    for name, tensor in tensors.items():
        raw_dtype = gguf.GGMLQuantizationType.MXFP4 if tensor.dtype == np.uint8 else None
        writer.add_tensor(name, np.ascontiguousarray(tensor), raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build_for_gguf(seed: int) -> nn.Module:
    """Return a model with the activation that no GGUF key describes at its published limit and alpha."""
    model = build(seed)
    for layer in model.model.layers:
        layer.mlp.experts.limit, layer.mlp.experts.alpha = 7.0, 1.702
        layer.mlp.experts.gate_up_proj_bias.mul_(20)  # so that the limit of 7 is reached
    return model


@cache
def dense_file_model() -> nn.Module:
    return build_for_gguf(7)


@pytest.mark.parametrize("is_fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["f32", "mxfp4"])
def test_a_gguf_file_gives_transformers_logits(is_packed: bool, is_fused: bool, tmp_path: Path) -> None:
    model = build_for_gguf(7)
    packed = pack(model, 7) if is_packed else {}
    check(write_gguf(tmp_path / "model.gguf", model, gguf_tensors(model, packed, is_fused)), model, 7)


@pytest.mark.parametrize("name", ["blk.1.attn_sinks.weight", "blk.0.ffn_up_exps.weight", "blk.0.attn_k.bias"])
def test_a_gguf_file_without_one_of_its_tensors_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tensors = gguf_tensors(dense_file_model(), {}, is_fused=False)
    del tensors[name]
    path = write_gguf(tmp_path / "model.gguf", dense_file_model(), tensors)
    with pytest.raises(CheckpointError, match=f"Missing required tensor: '{name}'"):
        Engine.load(path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize(
    "changes",
    [
        {"truncate": True},
        {"attention_factor": 1.1},
        {"mscale": 0.8, "mscale_all_dim": 0.5},
        {"rope_type": "default"},
        {"factor": 3.0, "beta_fast": 8.0},
    ],
    ids=str,
)
def test_other_rotations_of_config_json_give_transformers_logits(changes: dict[str, object], tmp_path: Path) -> None:
    rope = {**GPT_OSS["rope_parameters"], **changes}
    torch.manual_seed(3)
    model = GptOssForCausalLM(GptOssConfig(**{**GPT_OSS, "rope_parameters": rope}))
    randomise(model, 3)
    model.set_attn_implementation("eager")
    model.eval().requires_grad_(False).save_pretrained(tmp_path)
    check(tmp_path, model, 3)
    plain = json.loads((tmp_path / "config.json").read_text())
    plain["rope_parameters"] = {**GPT_OSS["rope_parameters"], "factor": 8.5}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    with pytest.raises(AssertionError):  # the rotation matters to these logits
        check(tmp_path, model, 3)
