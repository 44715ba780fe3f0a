"""The budget holds: memory that is really there, sampled every few milliseconds in a process of its own."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graphcore.device import find_cpp_compiler

PROCESS = Path(__file__).parents[1] / "budget_process.py"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif(not find_cpp_compiler(), reason="needs a C++ compiler, as compiled graphs do"),
]


@dataclass(frozen=True)
class Shape:
    """A llama's."""

    dim: int
    hidden: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int


SMALL = Shape(512, 2048, 12, 8192, 8, 4)
LLAMA_1B = Shape(2048, 8192, 16, 128256, 32, 8)


def random_llama(folder: Path, shape: Shape) -> Path:
    """Write a llama of random bf16 weights."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    dim, hidden, kv = shape.dim, shape.hidden, shape.dim // shape.heads * shape.kv_heads
    sizes = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (hidden, dim),
        "mlp.up_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
    }
    norm = torch.ones(dim, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(shape.vocab, dim), "model.norm.weight": norm}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": matrix(*size) for name, size in sizes.items()}
        tensors |= {f"{prefix}.{name}.weight": norm.clone() for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": hidden,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def sampled(folder: Path, policy: str, nbytes: int, context: int, prompt_tokens: int, *more: str) -> dict[str, int]:
    command = [sys.executable, str(PROCESS), str(folder), policy, str(nbytes), str(context), str(prompt_tokens), "4"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("small"), SMALL)


@pytest.mark.parametrize(
    ("policy", "budget"), [("on", 72_000_000), ("auto", 90_000_000), ("auto", 130_000_000), ("auto", 250_000_000)]
)
def test_memory_stays_within_the_budget(small: Path, policy: str, budget: int) -> None:
    """Growth is 13 to 14 MB where 21 MB are planned, however busy the machine is: no freed activation is kept."""
    found = sampled(small, policy, budget, context=1024, prompt_tokens=700)
    assert found["budget"] == budget
    assert found["held"] + found["workspace"] <= budget
    assert found["held"] + found["growth"] <= budget
    if found["streamed"]:
        assert found["growth"] <= found["workspace"]
    assert (found["streamed"] > 0) == (budget < 200_000_000)


def test_offloaded_keys_and_values_take_no_memory_but_that_of_the_page_cache(small: Path) -> None:
    """12 layers' keys and values of 4096 tokens are 50 MB, all of which a run takes at load if they lie in memory."""
    inside = sampled(small, "on", 140_000_000, 4096, 700)
    offloaded = sampled(small, "on", 62_000_000, 4096, 700)  # with the cache in memory 103 MB are needed
    assert inside["offloaded"] == 0
    assert 35_000_000 < offloaded["offloaded"] < 51_000_000
    assert offloaded["held"] + offloaded["growth"] <= 62_000_000
    assert inside["peak"] - offloaded["peak"] > 0.9 * offloaded["offloaded"]
    asked = sampled(small, "on", 140_000_000, 4096, 700, "streaming.kv_memory_budget=0")
    assert asked["offloaded"] == 12 * 2 * 4 * 64 * 2 * (4096 + 64)  # a page more, which is nobody's
    assert inside["peak"] - asked["peak"] > 0.9 * asked["offloaded"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("large"), LLAMA_1B)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "budget", "context"),
    [
        ("on", 300_000_000, 1024),
        ("on", 600_000_000, 4096),
        ("auto", 300_000_000, 1024),
        ("auto", 600_000_000, 4096),
        ("auto", 1_200_000_000, 4096),
        ("auto", 2_000_000_000, 4096),
    ],
)
def test_a_model_of_2_4_gb_stays_within_its_budget(large: Path, policy: str, budget: int, context: int) -> None:
    """Planned parts and all growth after warm-up together, nothing allowed on top."""
    found = sampled(large, policy, budget, context, prompt_tokens=900)
    assert found["held"] + found["growth"] <= budget
    assert found["streamed"] > 0
