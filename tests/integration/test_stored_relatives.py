"""Mixtral, Granite's mixtures and Ministral 3 in every form of their files give transformers' logits."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.files.layered_files import packed_file
from support.tiny_models import MINISTRAL3, TOLERANCE, TinyModel, ministral3, mistral3, randomise
from torch import Tensor, nn

from graphcore import Engine
from graphcore.errors import CheckpointError

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
MATRICES = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
OF_FILES = {"router.weight": "router.layer.weight", "gate_up_proj": "input_linear.weight"}
OF_FILES |= {"down_proj": "output_linear.weight"}


def logits_of(path: Path, ids: Tensor, *overrides: str) -> Tensor:
    with Engine.load(path, dtype="fp32", device="cpu", graph="eager", overrides=list(overrides)) as engine:
        return engine.logits(ids)


def save(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    return folder


def one_by_one(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a parameter of transformers' Mixtral under the names of published files, one tensor for each expert."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    before, _, leaf = name.rpartition(".")
    if leaf not in MATRICES:
        return {name: tensor}
    parts = tensor.chunk(len(MATRICES[leaf]), dim=1)
    return {
        f"{before}.{expert}.{matrix}.weight": part[expert]
        for matrix, part in zip(MATRICES[leaf], parts, strict=True)
        for expert in range(len(tensor))
    }


def granite_names(name: str) -> str:
    """Return the name of a parameter of transformers' GraniteMoe in published files."""
    for own, stored in OF_FILES.items():
        if name.endswith(own) and "block_sparse_moe" in name:
            return name.removesuffix(own).replace("experts.", "") + stored
    return name


@pytest.mark.parametrize("form", ["one by one", "fused"])
def test_mixtral_s_experts_are_read_one_by_one_and_fused(form: str, tiny_model: Tiny, tmp_path: Path) -> None:
    tiny = tiny_model("mixtral")
    own = tiny.reference.state_dict()
    stored = {k: v for name, tensor in own.items() for k, v in one_by_one(name, tensor).items()}
    assert "model.layers.2.block_sparse_moe.experts.5.w3.weight" in stored
    folder = save(tmp_path / "model", tiny.reference, stored if form == "one by one" else own)
    assert (logits_of(folder, tiny.ids) - tiny.logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("form", ["published", "transformers 5"])
def test_granite_s_experts_are_read_under_both_names(form: str, tiny_model: Tiny, tmp_path: Path) -> None:
    tiny = tiny_model("granite_moe")
    own = {name: tensor for name, tensor in tiny.reference.state_dict().items() if name != "lm_head.weight"}
    stored = {granite_names(name): tensor for name, tensor in own.items()}
    assert {"model.layers.2.block_sparse_moe.input_linear.weight"} < stored.keys() - own.keys()
    folder = save(tmp_path / "model", tiny.reference, stored if form == "published" else own)
    assert (logits_of(folder, tiny.ids) - tiny.logits).abs().max() < TOLERANCE


def write_numbered(path: Path, source: Path, is_packed: bool, absent: str = "") -> Path:
    """Write a GGUF file anew with a tensor for each expert, as llama.cpp's converter did in 2023; `absent` is left out.

    The experts have values that Q8_0 holds. Args: is_packed: True to store them as Q8_0, False for float32.
    """
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        values = np.array(tensor.data, dtype=np.float32)
        if "_exps" not in tensor.name:
            writer.add_tensor(tensor.name, values)
            continue
        for expert, matrix in enumerate(values):
            name = tensor.name.replace("_exps", f".{expert}", 1)
            if name != absent:
                blocks = gguf.quants.quantize(matrix, q8_0)
                rounded = gguf.quants.dequantize(blocks, q8_0)
                writer.add_tensor(name, *((blocks, None, q8_0) if is_packed else (rounded,)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_gguf_file_of_2023_has_its_experts_one_by_one(is_packed: bool, tiny_model: Tiny, tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "numbered.gguf", packed_file("mixtral", tmp_path), is_packed)
    tiny, q8_0 = tiny_model("mixtral"), gguf.GGMLQuantizationType.Q8_0
    own = {name: tensor.clone() for name, tensor in tiny.reference.state_dict().items()}
    rounded = {
        name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), q8_0), q8_0))
        for name, tensor in own.items()
        if ".experts." in name
    }
    tiny.reference.load_state_dict({**own, **rounded})
    expected = tiny.logits_of(tiny.ids)
    tiny.reference.load_state_dict(own)
    assert (logits_of(path, tiny.ids) - expected).abs().max() < TOLERANCE


def test_an_expert_that_a_gguf_file_of_2023_lacks_is_named(tmp_path: Path) -> None:
    lacking = "blk.1.ffn_up.3.weight"
    path = write_numbered(tmp_path / "numbered.gguf", packed_file("mixtral", tmp_path), False, lacking)
    with pytest.raises(CheckpointError, match=lacking):
        logits_of(path, torch.arange(4)[None])


def test_ministral_3_s_fp8_layers_are_read_out_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Published ones have one scale for each matrix, and one for its input, which is left out."""
    torch.manual_seed(0)
    model = mistral3({**MINISTRAL3, "model_type": "ministral3", "num_hidden_layers": 2, "intermediate_size": 96})
    randomise(model, 0)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "plain")
    tiny = TinyModel("ministral3_nested", tmp_path / "plain", model.eval())
    tensors, values = load_file(tiny.folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if "language_model" not in name or not name.endswith("proj.weight"):
            continue
        scale = tensor.abs().max() / 448
        tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.5)
        values[name.partition("language_model.")[2].removeprefix("model.")] = tensors[name].float() * scale
    folder = save(tmp_path / "model", tiny.reference, tensors)
    raw = json.loads((tiny.folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    fp8["modules_to_not_convert"] = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": fp8}))
    rounded = tiny.reference.model.language_model
    kept = {name: tensor.clone() for name, tensor in rounded.state_dict().items()}
    rounded.load_state_dict({**kept, **values})
    expected = tiny.logits_of(tiny.ids)
    rounded.load_state_dict(kept)
    assert (expected - tiny.logits).abs().max() > 1e-2
    assert (logits_of(folder, tiny.ids) - expected).abs().max() < TOLERANCE


def test_a_prompt_of_many_periods_scales_its_queries_as_transformers_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 7}
    model = ministral3(rope_parameters={**rope, "llama_4_scaling_beta": 1.5}, max_position_embeddings=400)
    randomise(model, 1)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 96, (1, 300), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, use_cache=False).logits
    assert (logits_of(tmp_path, ids, "prefill_chunk=37") - expected).abs().max() < 1e-4
