"""Folders of GPTQ's and compressed-tensors' weights with act-order answer as transformers does with the same values."""

from pathlib import Path

import pytest
import torch
from integer_files import save_model

from graphcore import Engine

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 46]]
FLOAT = ["quant.activations=float"]
ALL = ("_proj",)
CASES = [("gptq", 4), ("gptq", 8), ("gptq_v2", 4), ("pack-quantized", 4), ("pack-quantized", 8)]
CPU = {"device": "cpu", "dtype": "fp32"}


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("layout", "bits"), CASES)
def test_logits_are_those_of_the_same_weights_in_transformers(layout: str, bits: int, tmp_path: Path) -> None:
    model = save_model(tmp_path, layout, bits, 32, ordered=ALL)
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    with Engine.load(tmp_path, graph="eager", overrides=FLOAT, **CPU) as engine:
        assert largest_error(engine.logits(IDS), expected) < 2e-5
        weights = [module for module in engine.runner.builder.decoder.modules() if getattr(module, "packing", None)]
        assert {one.packing.format for one in weights} == {"q4_0" if bits == 4 else "q8_0"}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("graph", ["eager", "captured", pytest.param("compiled", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("layout", ["gptq", "pack-quantized"])
def test_every_graph_streams_to_the_bit_and_answers_as_transformers_does(
    layout: str, graph: str, family: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path, layout, 4, 32, torch.bfloat16, family, ALL)
    expected = model.generate(torch.tensor(IDS), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    logits = model(input_ids=expected, use_cache=False).logits
    found = []
    for way, options in (("off", FLOAT), ("on", [*FLOAT, "streaming.source=disk"])):
        with Engine.load(tmp_path, graph=graph, streaming=way, overrides=options, **CPU) as engine:
            assert engine.plan.is_streaming == (way == "on")
            found.append(engine.logits(IDS))
            (answer,) = engine.generate(IDS[0], max_new_tokens=8, ignore_eos=True)
            assert list(answer.token_ids) == expected[0, 20:].tolist()
    assert largest_error(found[0], logits[:, :20]) < 2e-5
    assert torch.equal(*found)
