"""Folders of every quantised layout answer as transformers does with the same values, in every graph, streamed too."""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from support.files.adapter_files import drawn, write_peft
from support.files.integer_files import save_model
from support.files.quantized_files import FOLDER_LAYOUTS, save_quantized, save_quantized_mixture
from support.streaming import runs_as
from torch import nn

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.errors import UnsupportedError
from graphcore.export.pack import Packer
from graphcore.progress import ignore_progress

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("small_parts")]

GOLDEN = Path(__file__).parents[1] / "golden" / "quantised_folders"
IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 46]]
FLOAT = ["quant.activations=float"]
OF_EACH_FORMAT = ("gptq 4", "awq", "packed 8", "fp8 blocks", "nvfp4", "nf4 nested", "fp4")


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("layout", FOLDER_LAYOUTS)
def test_logits_are_those_of_the_same_values(layout: str, tmp_path: Path) -> None:
    model = save_quantized(tmp_path, layout)
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=FLOAT) as engine:
        assert largest_error(engine.logits(IDS), expected) < 2e-5
        weights = [module for module in engine.runner.builder.decoder.modules() if getattr(module, "packing", None)]
        assert {one.packing.format for one in weights} == {FOLDER_LAYOUTS[layout].format}
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager") as engine:  # as it comes
        assert largest_error(engine.logits(IDS), expected) < 1e-3


@pytest.mark.parametrize("layout", OF_EACH_FORMAT)
def test_logits_in_bf16_are_as_near_as_those_of_transformers_in_bf16(layout: str, tmp_path: Path) -> None:
    """The prompt has enough tokens for products in panels, which only bf16 has (kernels/cpu/products.py)."""
    model, ids = save_quantized(tmp_path, layout), torch.tensor(IDS)
    expected = model(input_ids=ids, use_cache=False).logits
    bound = 2 * largest_error(deepcopy(model).bfloat16()(input_ids=ids, use_cache=False).logits, expected)
    with Engine.load(tmp_path, dtype="bf16", device="cpu", graph="eager") as engine:
        assert largest_error(engine.logits(IDS), expected) < bound


LIBRARY_FOLDERS = {  # largest error of logits: 1e-2 where the library rounded the weights that it unpacked to 16 bits
    "llama_auto_round": ({"affine4", "affine8"}, 2e-6),
    "llama_awq": ({"affine4"}, 1e-3),
    "llama_compressed_tensors": ({"affine4", "fp8"}, 1e-2),
    "llama_fp8": ({"fp8"}, 2e-6),
    "llama_gptq": ({"affine4", "affine8"}, 2e-6),
    "llama_int8": ({"affine8"}, 2e-6),
    "llama_nf4": ({"nf4"}, 1e-2),
    "llama_nvfp4": ({"nvfp4_f32"}, 1e-2),
}


@pytest.mark.parametrize("name", LIBRARY_FOLDERS)
def test_folders_that_libraries_saved_answer_as_their_weights_do(name: str) -> None:
    formats, bound = LIBRARY_FOLDERS[name]
    recorded = np.load(GOLDEN / name / "logits.npz")
    with Engine.load(GOLDEN / name, dtype="fp32", device="cpu", graph="eager", overrides=FLOAT) as engine:
        found = engine.logits(recorded["tokens"].tolist())
        weights = [module for module in engine.runner.builder.decoder.modules() if getattr(module, "packing", None)]
        assert {one.packing.format for one in weights} == formats
    assert largest_error(found, torch.from_numpy(recorded["dense_logits"]).float().view(found.shape)) < bound


def test_a_quant_config_beside_an_older_config_is_read(tmp_path: Path) -> None:
    """AutoAWQ's file, whose names are those of its first versions."""
    model = save_quantized(tmp_path, "awq")
    stated = json.loads((tmp_path / "config.json").read_text())
    del stated["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    older = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(older))
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=FLOAT) as engine:
        found = engine.logits(IDS)
    assert largest_error(found, model(input_ids=torch.tensor(IDS), use_cache=False).logits) < 2e-5


def test_a_config_of_model_optimizer_beside_the_models_is_read(tmp_path: Path) -> None:
    model = save_quantized(tmp_path, "nvfp4 modelopt")
    stated = json.loads((tmp_path / "config.json").read_text())
    del stated["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    older = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(older))
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=FLOAT) as engine:
        found = engine.logits(IDS)
    assert largest_error(found, model(input_ids=torch.tensor(IDS), use_cache=False).logits) < 2e-5


@pytest.mark.parametrize("graph", ["auto", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", OF_EACH_FORMAT)
def test_every_graph_streams_to_the_bit(layout: str, graph: str, tmp_path: Path) -> None:
    model = save_quantized(tmp_path, layout, "qwen2")
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


@torch.no_grad()
def add_factors(model: nn.Module, folder: Path) -> Path:
    """Save random factors of some projections as an adapter, and add their products to transformers' weights."""
    weights = {
        name: one for name, one in model.state_dict().items() if name.endswith(("q_proj.weight", "down_proj.weight"))
    }
    factors = drawn({name.removesuffix(".weight"): tuple(one.shape) for name, one in weights.items()})
    for name, one in weights.items():
        first, second = factors[name.removesuffix(".weight")]
        one += 8 / len(first) * second @ first / 8
    return write_peft(folder, {name: (first, second / 8) for name, (first, second) in factors.items()})


@pytest.mark.parametrize(
    ("layout", "graph"),
    [
        *(("act-order", "eager"), ("act-order", "auto"), ("awq", "eager"), ("fp8 blocks", "auto"), ("nf4", "eager")),
        *(
            pytest.param(layout, "compiled", marks=pytest.mark.slow)
            for layout in ("act-order", "awq", "fp8 blocks", "nf4")
        ),
    ],
)
def test_an_adapter_runs_beside_weights_of_a_folder(layout: str, graph: str, tmp_path: Path) -> None:
    """Factors read x as it is, also where the weight's columns have another order."""
    base = tmp_path / "base"
    model = (
        save_model(base, "gptq", 4, 32, ordered=("_proj",)) if layout == "act-order" else save_quantized(base, layout)
    )
    plain = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    adapter = f"model.adapter={add_factors(model, tmp_path / 'adapter')}"
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    assert largest_error(plain, expected) > 0.01
    for options in ([], ["streaming=on", "streaming.source=disk"]):
        with Engine.load(
            base, dtype="fp32", device="cpu", graph=graph, overrides=[*FLOAT, adapter, *options]
        ) as engine:
            assert runs_as(engine, graph)
            assert largest_error(engine.logits(IDS), expected) < 2e-5
            assert largest_error(engine.logits(IDS, by_token=True), expected) < 2e-5


@pytest.mark.parametrize(
    ("layout", "graph"), [("awq", "auto"), ("int8 bnb", "eager"), ("fp8 blocks", "eager"), ("nvfp4", "auto")]
)
def test_a_mixture_answers_as_transformers_does(layout: str, graph: str, tmp_path: Path) -> None:
    model = save_quantized_mixture(tmp_path, layout)
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    for options in ([], ["streaming=on", "streaming.source=host"]):
        with Engine.load(tmp_path, dtype="fp32", device="cpu", graph=graph, overrides=[*FLOAT, *options]) as engine:
            assert runs_as(engine, graph)
            assert largest_error(engine.logits(IDS), expected) < 2e-5
            assert len(engine.generate(IDS[0], max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4


@pytest.mark.parametrize("layout", ["awq", "int8 bnb", "fp8 rows", "nf4", "nvfp4"])
def test_what_no_gguf_type_holds_is_not_packed(layout: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, layout)
    settings = compose_settings([f"model.checkpoint={tmp_path}"])
    source = open_model(settings.model, 0, tmp_path / "cache", ignore_progress)
    with pytest.raises(
        UnsupportedError, match=f"{FOLDER_LAYOUTS[layout].format}, which GGUF files do not have"
    ) as refusal:
        list(Packer(source, "stored").pack(tmp_path / "packed.gguf", ignore_progress))
    assert "such as quant=q8_0" in str(refusal.value)
    assert not (tmp_path / "packed.gguf").exists()


@pytest.mark.parametrize("layout", ["awq", "fp8 rows"])
def test_the_values_are_packed_as_another_format(layout: str, tmp_path: Path) -> None:
    model = save_quantized(tmp_path, layout)
    settings = compose_settings([f"model.checkpoint={tmp_path}"])
    source = open_model(settings.model, 0, tmp_path / "cache", ignore_progress)
    errors = [one.error for one in Packer(source, "q8_0").pack(tmp_path / "packed.gguf", ignore_progress)]
    assert max(errors) < 0.01
    with Engine.load(tmp_path / "packed.gguf", dtype="fp32", device="cpu", graph="eager", overrides=FLOAT) as engine:
        found = engine.logits(IDS)
    assert largest_error(found, model(input_ids=torch.tensor(IDS), use_cache=False).logits) < 0.05
