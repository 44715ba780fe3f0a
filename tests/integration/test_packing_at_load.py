"""quant= packs a dense checkpoint while it is loaded: the model that then runs is transformers' on rounded weights.

The reference rounds every matrix whose rows are whole blocks with gguf-py and multiplies densely, in float32. What
remains between the two is the order of sums.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.chat_folders import TINY
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from graphcore import Engine
from graphcore.device import find_cpp_compiler
from graphcore.weights.packed_weights import formats_of

pytestmark = pytest.mark.thorough

TOLERANCE = 2e-5
TOKENS = np.load(TINY / "logits.npz")["tokens"].tolist()
TYPES = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}
FORMS = [
    "eager",
    pytest.param("captured", marks=pytest.mark.skipif(not find_cpp_compiler(), reason="needs a C++ compiler")),
]


def rounded(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return the matrix as gguf-py packs and unpacks it; as it is where a row is no whole number of blocks."""
    if weight.shape[1] % 32:
        return weight
    raw = gguf.quants.quantize(weight.numpy(), TYPES[name])
    return torch.from_numpy(gguf.quants.dequantize(raw, TYPES[name]).copy())


@torch.inference_mode()
def reference_logits(folder: Path, name: str) -> torch.Tensor:
    """Return transformers' logits with rounded matrices: [T, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tables = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, Conv1D):
            module.weight.copy_(rounded(module.weight.T.contiguous(), name).T)
        elif isinstance(module, nn.Linear) and module.weight is not tables:
            module.weight.copy_(rounded(module.weight, name))
    tables.copy_(rounded(tables, name))
    return model(torch.tensor([TOKENS])).logits[0]


def packed_engine(folder: Path, graph: str, *overrides: str) -> Engine:
    return Engine.load(folder, dtype="fp32", device="cpu", graph=graph, overrides=list(overrides))


def decoded_logits(engine: Engine) -> torch.Tensor:
    """Return the logits of one decode step after another: [T, V]."""
    return torch.cat([engine.runner.extend([[token]], [at]) for at, token in enumerate(TOKENS)])


@pytest.mark.parametrize("graph", FORMS)
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt2"])
def test_a_dense_checkpoint_runs_as_its_rounded_self(name: str, graph: str) -> None:
    expected = reference_logits(TINY / name, "q8_0")
    with packed_engine(TINY / name, graph, "quant=q8_0") as engine:
        formats = {weight: form for weight, form, _ in formats_of(engine.runner.builder.decoder)}
        assert formats["layers.0.mlp.down_proj.weight"] == "q8_0"
        assert (decoded_logits(engine) - expected).abs().max() < TOLERANCE
        if graph == "eager":  # a chunk, too; where decode is captured it would be compiled
            assert (engine.logits([TOKENS])[0] - expected).abs().max() < TOLERANCE


def test_packed_weights_take_fewer_bytes_and_norms_stay_dense() -> None:
    with (
        packed_engine(TINY / "qwen3", "eager") as dense,
        packed_engine(TINY / "qwen3", "eager", "quant=q4_0") as packed,
    ):
        sizes = [engine.plan.weight_nbytes for engine in (dense, packed)]
        formats = {weight: form for weight, form, _ in formats_of(packed.runner.builder.decoder)}
    assert sizes[1] < sizes[0] / 4
    assert {form for weight, form in formats.items() if "norm" in weight} == {"float32"}
    matrices = {weight: form for weight, form in formats.items() if "norm" not in weight}
    assert matrices.pop("lm_head.weight") == "q8_0"  # q6_k needs rows of 256
    assert set(matrices.values()) == {"q4_0"}


@pytest.mark.skipif(not find_cpp_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize(("activations", "bound"), [("float", 0.02), ("auto", 0.02), ("int8", 0.08)])
def test_activations_of_fewer_bits_cost_what_is_promised(activations: str, bound: float) -> None:
    """bf16 caches and products are off by 4e-3 each; 8-bit activations by up to 1 % each."""
    expected = reference_logits(TINY / "llama3", "q8_0")
    overrides = ["quant=q8_0", f"quant.activations={activations}"]
    with Engine.load(TINY / "llama3", dtype="bf16", device="cpu", graph="captured", overrides=overrides) as engine:
        found = decoded_logits(engine)
    assert (found - expected).norm() / expected.norm() < bound
