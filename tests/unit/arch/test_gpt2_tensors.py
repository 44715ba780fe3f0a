"""The table of GPT-2's tensors against gguf-py's, and against a file of llama.cpp's converter."""

from pathlib import Path

import gguf
from dev_models import GPT2, config_of

from graphcore.arch.families.gpt2 import gpt2_tensors

TINY = Path(__file__).parents[2] / "golden" / "tiny" / "gpt2.gguf"


def test_the_names_are_those_of_the_gguf_package() -> None:
    modules = {name.rpartition(".")[0] for name in gpt2_tensors(config_of(GPT2), 2)}
    kinds = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GPT2]
    expected = {gguf.TENSOR_NAMES[kind].format(bid=layer) for kind in kinds for layer in range(2)}
    assert modules == expected


def test_names_and_shapes_are_those_of_a_converted_file() -> None:
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 96}
    expected = gpt2_tensors(config_of(GPT2, **sizes), 2)
    found = {tensor.name: tuple(map(int, tensor.shape)) for tensor in gguf.GGUFReader(TINY).tensors}
    assert expected.pop("output.weight") == (64, 96)  # tied, so the converter leaves it out
    assert found == expected


def test_sizes_are_those_of_the_published_model() -> None:
    shapes = gpt2_tensors(config_of(GPT2), 12)
    assert shapes["token_embd.weight"] == (768, 50257)
    assert shapes["position_embd.weight"] == (768, 1024)
    assert shapes["blk.11.attn_qkv.weight"] == (768, 2304)
    assert shapes["blk.11.ffn_down.weight"] == (3072, 768)
    without_head = [shape for name, shape in shapes.items() if name != "output.weight"]
    assert sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in without_head) == 124_439_808
