"""Folders of GPTQ's and compressed-tensors' integer weights answer as transformers does with the same values."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from support.files import llama_files
from support.files.integer_files import LAYOUTS, SHAPE, save_mixture, save_model
from support.streaming import runs_as

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.errors import GraphcoreError
from graphcore.export.pack import Packer
from graphcore.progress import ignore_progress

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("small_parts")]

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 46]]
FLOAT = ["quant.activations=float"]
CASES = [(layout, bits, group) for layout in LAYOUTS for bits in (4, 8) for group in (32, 64, 0)]
CASES = [case for case in CASES if case[:2] != ("int-quantized", 4)]


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("layout", "bits", "group"), CASES)
def test_logits_are_those_of_the_same_weights_in_transformers(
    layout: str, bits: int, group: int, tmp_path: Path
) -> None:
    model = save_model(tmp_path, layout, bits, group)
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=FLOAT) as engine:
        assert largest_error(engine.logits(IDS), expected) < 2e-5
        weights = [module for module in engine.runner.builder.decoder.modules() if getattr(module, "packing", None)]
        assert {one.packing.format for one in weights} == {"q4_0" if bits == 4 else "q8_0"}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("graph", ["auto", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("layout", "bits"), [("gptq", 4), ("pack-quantized", 4), ("int-quantized", 8)])
def test_every_graph_streams_to_the_bit_and_answers_as_transformers_does(
    layout: str, bits: int, graph: str, family: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path, layout, bits, 32, torch.bfloat16, llama_files.build(family, 3, **SHAPE))
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    found = []
    for options in (FLOAT, [*FLOAT, "streaming.source=disk"]):
        way = "on" if len(options) > 1 else "off"
        with Engine.load(tmp_path, dtype="fp32", device="cpu", graph=graph, streaming=way, overrides=options) as engine:
            assert runs_as(engine, graph)
            assert engine.plan.is_streaming == (way == "on")
            logits = engine.logits(IDS)
            found.append((logits, engine.generate(IDS[0], max_new_tokens=8, ignore_eos=True)[0].token_ids))
        assert largest_error(logits, expected) < 2e-5
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    ("layout", "bits", "graph"), [("gptq", 4, "auto"), ("pack-quantized", 8, "eager"), ("int-quantized", 8, "auto")]
)
def test_a_mixture_answers_as_transformers_does_from_memory_and_from_a_store(
    layout: str, bits: int, graph: str, tmp_path: Path
) -> None:
    model = save_mixture(tmp_path, layout, bits, 32)
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    for options in ([], ["streaming=on", "streaming.source=host"]):
        with Engine.load(tmp_path, dtype="fp32", device="cpu", graph=graph, overrides=[*FLOAT, *options]) as engine:
            assert runs_as(engine, graph)
            assert largest_error(engine.logits(IDS), expected) < 2e-5
            assert len(engine.generate(IDS[0], max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4


def test_experts_of_integers_are_not_streamed_from_files_one_by_one(tmp_path: Path) -> None:
    save_mixture(tmp_path, "gptq", 4, 32)
    options = ["streaming.source=disk", "streaming.expert_cache=0"]
    with pytest.raises(GraphcoreError, match="stored as codes and scales, which are not read one by one"):
        Engine.load(tmp_path, device="cpu", streaming="on", overrides=options)


@pytest.mark.parametrize(("layout", "bits"), [("gptq", 4), ("int-quantized", 8)])
def test_a_packed_gguf_has_the_same_weights(layout: str, bits: int, tmp_path: Path) -> None:
    model = save_model(tmp_path / "folder", layout, bits, 64)
    settings = compose_settings([f"model.checkpoint={tmp_path / 'folder'}"])
    source = open_model(settings.model, 0, tmp_path / "cache", ignore_progress)
    list(Packer(source, "stored").pack(tmp_path / "packed.gguf", ignore_progress))
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "packed.gguf").tensors}
    down = stored["blk.1.ffn_down.weight"]
    assert down.tensor_type.name == ("Q4_0" if bits == 4 else "Q8_0")
    weights = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type))
    assert torch.equal(weights, model.state_dict()["model.layers.1.mlp.down_proj.weight"])
    with Engine.load(tmp_path / "packed.gguf", dtype="fp32", device="cpu", graph="eager", overrides=FLOAT) as engine:
        found = engine.logits(IDS)
    assert largest_error(found, model(input_ids=torch.tensor(IDS), use_cache=False).logits) < 2e-5


def test_a_quantize_config_beside_an_older_config_is_read(tmp_path: Path) -> None:
    model = save_model(tmp_path, "gptq", 4, 32)
    stated = json.loads((tmp_path / "config.json").read_text())
    older = stated.pop("quantization_config")
    del older["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    (tmp_path / "quantize_config.json").write_text(json.dumps(older))
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=FLOAT) as engine:
        found = engine.logits(IDS)
    assert largest_error(found, model(input_ids=torch.tensor(IDS), use_cache=False).logits) < 2e-5


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    save_model(tmp_path, "int-quantized", 8, 0)
    stated = json.loads((tmp_path / "config.json").read_text())
    stated["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8}
    group = stated["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "dynamic": True}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with Engine.load(tmp_path, device="cpu", graph="eager") as engine:
        notes = "\n".join(engine.notes)
    assert "input_activations is left out: activations keep" in notes
    assert "kv_cache_scheme is left out" in notes
