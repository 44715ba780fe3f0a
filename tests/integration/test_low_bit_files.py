"""Files whose matrices have one to three bits a weight, and others beside them, answer as transformers does."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import llama_files
import pytest
import torch
from packed_matrices import stored_matrix
from torch import nn

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.export.pack import Packer
from graphcore.progress import ignore_progress

LEVELS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
FILES = {
    "iq2_xxs": ("iq2_xxs", "q2_k", "iq2_xxs", "q4_k", "iq2_xxs", "q6_k", "iq4_nl"),  # as llama.cpp mixes them
    "iq3": ("iq3_s", "iq3_xxs", "q4_k", "iq3_s", "q5_k"),
    "iq1": ("iq1_s", "iq1_m", "q2_k", "iq2_xxs", "q5_k"),
    "iq2": ("iq2_xs", "iq2_s", "q4_k", "iq3_s", "iq4_xs"),
}
SHAPES = (
    {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    {"hidden_size": 512, "intermediate_size": 768, "head_dim": 128},
)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]])


def low_bit_file(
    path: Path, formats: Sequence[str], shape: dict[str, int], seed: int, family: str = "qwen2"
) -> tuple[nn.Module, Path]:
    """Write a file whose matrices are of these formats, one after another; return transformers' model, and its path."""
    model = llama_files.build(family, seed, num_hidden_layers=2, vocab_size=96, **shape)
    stored = {}
    layers = [one for one in model.named_modules() if isinstance(one[1], nn.Linear | nn.Embedding)]
    for number, (name, module) in enumerate(layers):
        matrix = stored_matrix(formats[number % len(formats)], *module.weight.shape, seed=seed + number)
        stored[f"{name}.weight"], dense = matrix, matrix.dense.clone()
        if family == "llama" and name.endswith(("q_proj", "k_proj")):  # whose rows the file has in another order
            dense = dense.unflatten(0, (-1, shape["head_dim"] // 2, 2)).transpose(1, 2).flatten(0, 2)
        module.weight.data = dense
    return model, llama_files.write_gguf(path, model, family, stored)


@pytest.mark.parametrize("graph", ["eager", "captured", pytest.param("compiled", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("shape", SHAPES, ids=["256", "512"])
@pytest.mark.parametrize("name", FILES)
def test_a_mixed_file_answers_as_transformers_does(
    name: str, shape: dict[str, int], graph: str, tmp_path: Path
) -> None:
    model, path = low_bit_file(tmp_path / "model.gguf", FILES[name], shape, seed=len(name))
    expected = model(input_ids=IDS, use_cache=False).logits
    overrides = ["quant.activations=float"] if graph != "captured" else []
    with Engine.load(path, dtype="fp32", device="cpu", graph=graph, overrides=overrides) as engine:
        found = engine.logits(IDS.tolist())
        assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
        prompt = IDS[0].tolist()
        tokens = engine.generate(prompt, max_new_tokens=6, ignore_eos=True)[0].token_ids
    whole = model(input_ids=torch.tensor([prompt + list(tokens)]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = whole.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (whole.max(1).values - chosen).max() < 0.02 * whole.abs().max(), "a token far from the best"


@pytest.mark.parametrize("name", FILES)
def test_a_streamed_file_answers_to_the_bit(name: str, tmp_path: Path) -> None:
    _, path = low_bit_file(tmp_path / "model.gguf", FILES[name], SHAPES[0], seed=7)
    with Engine.load(path, device="cpu") as engine:
        expected = engine.logits(IDS.tolist())
        answer = engine.generate(IDS[0].tolist(), max_new_tokens=8, ignore_eos=True)[0].token_ids
    options = ["streaming.source=disk", "streaming.prefetch=1"]
    with Engine.load(path, device="cpu", streaming="on", overrides=options) as engine:
        assert engine.plan.is_streaming
        assert torch.equal(engine.logits(IDS.tolist()), expected)
        assert engine.generate(IDS[0].tolist(), max_new_tokens=8, ignore_eos=True)[0].token_ids == answer


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_file_takes_no_more_memory_than_its_codes(name: str, tmp_path: Path) -> None:
    """Three or four bits a weight and its scales, never dense weights."""
    _, path = low_bit_file(tmp_path / "model.gguf", [name], SHAPES[1], seed=3)
    with Engine.load(path, device="cpu") as engine:
        weights = sum(
            p.numel() for p in llama_files.build("qwen2", num_hidden_layers=2, vocab_size=96, **SHAPES[1]).parameters()
        )
        bits = 8 * engine.plan.weight_nbytes / weights
    assert bits < (3.5 if name in LEVELS[:5] else 4.5)


def test_rows_that_llama_cpp_has_put_into_another_order_are_put_back(tmp_path: Path) -> None:
    model, path = low_bit_file(tmp_path / "model.gguf", FILES["iq2_xxs"], SHAPES[0], 5, "llama")
    expected = model(input_ids=IDS, use_cache=False).logits
    with Engine.load(path, dtype="fp32", device="cpu", overrides="quant.activations=float") as engine:
        assert (engine.logits(IDS.tolist()) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_packing_keeps_the_bytes_that_are_stored(tmp_path: Path) -> None:
    _, path = low_bit_file(tmp_path / "model.gguf", LEVELS, SHAPES[0], seed=9)
    settings = compose_settings([f"model.checkpoint={path}"])
    source = open_model(settings.model, 0, tmp_path / "cache", ignore_progress)
    list(Packer(source, "stored").pack(tmp_path / "packed.gguf", ignore_progress))
    before, after = (
        {one.name: one for one in gguf.GGUFReader(one).tensors} for one in (path, tmp_path / "packed.gguf")
    )
    kinds = {one.tensor_type.name.lower() for one in after.values()}
    assert set(LEVELS) <= kinds
    for name, tensor in before.items():
        assert (after[name].data == tensor.data).all(), name
