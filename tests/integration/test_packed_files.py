"""Files that task=pack writes hold the model that they were made of: to graphcore, to gguf-py and to llama.cpp."""

import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chat_folders import TINY, save_chat_folder
from support.files import llama_files, qwen_delta_files, qwen_moe_files
from support.tiny_models import DELTA_RULES, TinyModel, add_tokenizer

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import Model, open_model
from graphcore.errors import UnsupportedError
from graphcore.export.gguf_file import Field, GGUFFile
from graphcore.export.pack import PackedTensor, Packer
from graphcore.quant.format_choice import packable_names
from graphcore.tokenizer.gguf_fields import PROBES

pytestmark = pytest.mark.thorough

GOLDEN = ("llama3", "qwen3", "gemma3", "gpt2")
LOGITS = np.load(TINY / "logits.npz")
NOT_OURS = ("general.name", "general.size_label")  # the converter's descriptions for people
OURS_ALONE = ("rope.dimension_count", "attention.sliding_window_pattern")  # said, where the converter leaves a default


def open_path(path: Path, *overrides: str) -> Model:
    settings = compose_settings([f"model.checkpoint={path}", *overrides])
    return open_model(settings.model, 0, path.parent / "cache", lambda *_: None)


def pack(source: Path, path: Path, asked: str, *overrides: str, requantize: bool = False) -> list[PackedTensor]:
    packer = Packer(open_path(source, *overrides), asked, requantize=requantize)
    return list(packer.pack(path, lambda *_: None))


def logits_of(path: Path, tokens: list[int]) -> torch.Tensor:
    with Engine.load(path, dtype="fp32", graph="eager", device="cpu") as engine:
        return engine.logits([tokens])[0]


def read(path: Path) -> tuple[dict[str, gguf.ReaderTensor], dict[str, object]]:
    """Return gguf-py's view of a file: tensors by name, metadata but for the header's own counts."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return {tensor.name: tensor for tensor in reader.tensors}, fields


@pytest.mark.parametrize("name", GOLDEN)
def test_a_hugging_face_model_becomes_the_file_that_llama_cpps_converter_makes(name: str, tmp_path: Path) -> None:
    pack(TINY / name, tmp_path / "packed.gguf", "stored")
    (tensors, fields), (expected, wanted) = read(tmp_path / "packed.gguf"), read(TINY / f"{name}.gguf")
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensors[key].tensor_type == tensor.tensor_type
        if key == "rope_freqs.weight":  # the converter blends in another order
            np.testing.assert_allclose(tensors[key].data, tensor.data, rtol=1e-6)
        else:
            assert np.array_equal(tensors[key].data, tensor.data), key
    differing = {key for key in fields.keys() | wanted.keys() if fields.get(key) != wanted.get(key)}
    assert {key for key in differing if key not in NOT_OURS and not key.endswith(OURS_ALONE)} == set()


GEMMA4 = ("gemma4", "gemma4_dense", "gemma4_moe")
OTHERS = ("glm4_moe", "glm4", "glm", "olmo2", "olmo3", "exaone4", "exaone4_full", "lfm2", "lfm2_moe")
LATENT = ("deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize(
    "name",
    [
        *("llama3", "llama_biased", "mistral", "qwen2", "qwen3", "qwen3_moe", *DELTA_RULES, *GEMMA4, *OTHERS),
        *("ministral3", "ministral3_sliding", "mistral3_nested", "ministral3_nested", "mixtral", *LATENT, "gpt2"),
        *("granite", "granite_biased", "granite_moe"),
    ],
)
def test_a_packed_model_answers_as_the_source_does(
    tiny_model: Callable[[str], TinyModel], name: str, tmp_path: Path
) -> None:
    tiny = tiny_model(name)
    pack(tiny.folder, tmp_path / "packed.gguf", "stored")
    assert (logits_of(tmp_path / "packed.gguf", tiny.ids[0].tolist()) - tiny.logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
    ids=str,
)
def test_a_packed_model_keeps_its_rope_scaling(rope: dict[str, object], tmp_path: Path) -> None:
    reference = llama_files.build("qwen2", rope_scaling=dict(rope))
    reference.save_pretrained(tmp_path)
    pack(tmp_path, tmp_path / "packed.gguf", "stored")
    ids = torch.arange(80)[None]
    expected = reference(input_ids=ids, use_cache=False).logits[0]
    assert (logits_of(tmp_path / "packed.gguf", ids[0].tolist()) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma3", "its blocks differ"),
        ("qwen2_sliding", "its blocks differ"),
        ("smollm3", "its blocks differ"),  # layers that do not rotate have another distance than llama.cpp's
    ],
)
def test_a_model_that_gguf_cannot_describe_is_refused_before_anything_is_written(
    tiny_model: Callable[[str], TinyModel], name: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        pack(tiny_model(name).folder, tmp_path / "packed.gguf", "q8_0")
    assert list(tmp_path.glob("*.gguf")) == []


@pytest.mark.parametrize(
    "changes", [{"norm_topk_prob": False}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}], ids=str
)
def test_a_mixture_that_gguf_cannot_describe_is_refused_before_anything_is_written(
    changes: dict[str, object], tmp_path: Path
) -> None:
    qwen_moe_files.save(tmp_path, qwen_moe_files.build(**changes), is_fused=False)
    with pytest.raises(UnsupportedError, match="its blocks differ"):
        pack(tmp_path, tmp_path / "packed.gguf", "q8_0")
    assert list(tmp_path.glob("*.gguf")) == []


@pytest.mark.parametrize("asked", ["q8_0", "q4_k", "f16", "bf16"])
@pytest.mark.parametrize("name", GOLDEN)
def test_packed_tensors_are_the_sources_within_the_error_that_is_reported(
    name: str, asked: str, tmp_path: Path
) -> None:
    packed = pack(TINY / name, tmp_path / "packed.gguf", asked)
    tensors, _ = read(tmp_path / "packed.gguf")
    expected, _ = read(TINY / f"{name}.gguf")
    for one in packed:
        dense = expected[one.entry.name].data.astype(np.float64)
        tensor = tensors[one.entry.name]
        assert tensor.tensor_type.name.lower() == one.entry.encoding
        back = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(dense.shape)
        error = np.sqrt(((back - dense) ** 2).sum() / (dense**2).sum())
        assert error == pytest.approx(one.error, rel=1e-4, abs=1e-6)
        is_matrix = dense.ndim > 1 and "position" not in one.entry.name
        is_packed = is_matrix and (asked in ("f16", "bf16") or dense.shape[-1] % 32 == 0)
        assert (one.entry.encoding != "f32") == is_packed


@pytest.mark.parametrize("name", GOLDEN)
def test_a_gguf_model_is_copied_byte_for_byte(name: str, tmp_path: Path) -> None:
    pack(TINY / name, tmp_path / "small.gguf", "q8_0")
    pack(tmp_path / "small.gguf", tmp_path / "copy.gguf", "stored")
    assert (tmp_path / "copy.gguf").stat().st_size == (tmp_path / "small.gguf").stat().st_size
    (tensors, fields), (expected, wanted) = read(tmp_path / "copy.gguf"), read(tmp_path / "small.gguf")
    assert fields == wanted
    assert list(tensors) == list(expected)
    assert all(np.array_equal(tensors[key].data, expected[key].data) for key in expected)


def test_metadata_keeps_its_number_types(tmp_path: Path) -> None:
    kinds = gguf.GGUFValueType
    model = open_path(TINY / "qwen3.gguf")
    packer = Packer(model, "stored")
    fields = {
        **packer.metadata.fields,
        "x.wide": Field(7, kinds.UINT64),
        "x.precise": Field(0.1, kinds.FLOAT64),
        "x.small": Field((1, -2), kinds.ARRAY, kinds.INT8),
    }
    with GGUFFile(tmp_path / "typed.gguf", "qwen3", fields, packer.entries) as file:
        for entry in packer.entries:
            file.write(model.checkpoint.read(entry.name).reshape(-1).view(torch.uint8))
    pack(tmp_path / "typed.gguf", tmp_path / "copy.gguf", "stored")
    assert (tmp_path / "copy.gguf").read_bytes() == (tmp_path / "typed.gguf").read_bytes()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_gguf_model_is_packed_as_the_safetensors_it_came_from(name: str, tmp_path: Path) -> None:
    pack(TINY / name, tmp_path / "of_hf.gguf", "q4_0")
    pack(TINY / f"{name}.gguf", tmp_path / "of_gguf.gguf", "q4_0")
    tensors, expected = read(tmp_path / "of_gguf.gguf")[0], read(tmp_path / "of_hf.gguf")[0]
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[key].data, expected[key].data) for key in expected if key != "rope_freqs.weight")


@pytest.mark.parametrize("name", ["llama3", "gptoss"])
def test_packed_matrices_stay_as_they_are_unless_they_are_to_be_packed_again(name: str, tmp_path: Path) -> None:
    """llama3 as a GGUF file of q4_1 with a head of q8_0, gpt-oss as a folder with experts of MXFP4."""
    source, dense = TINY / name, {"f32", "f16", "bf16"}
    if name == "llama3":
        pack(TINY / name, source := tmp_path / "small.gguf", "q4_1")
    pack(source, tmp_path / "stored.gguf", "stored")
    before, fields = read(tmp_path / "stored.gguf")
    packed = {key for key, tensor in before.items() if tensor.tensor_type.name.lower() not in dense}
    assert packed
    pack(source, tmp_path / "kept.gguf", "q8_0")
    after, kept_fields = read(tmp_path / "kept.gguf")
    for key, tensor in before.items():
        if key in packed:
            assert after[key].tensor_type == tensor.tensor_type, key
            assert np.array_equal(after[key].data, tensor.data), key
        elif len(tensor.shape) > 1 and tensor.shape[0] % 32 == 0 and not key.endswith(("bias", "gate_inp.weight")):
            assert after[key].tensor_type.name == "Q8_0", key
    if name == "llama3":  # nothing was packed, so that the file's type is still q4_1
        assert kept_fields == fields
    pack(source, tmp_path / "again.gguf", "q8_0", requantize=True)
    assert {read(tmp_path / "again.gguf")[0][key].tensor_type.name for key in packed} == {"Q8_0"}


def test_types_that_gguf_py_does_not_know_are_copied_too(tmp_path: Path) -> None:
    pack(TINY / "gpt2", tmp_path / "ternary.gguf", "i2_s")
    model = open_path(tmp_path / "ternary.gguf")
    assert model.checkpoint.tensors["blk.0.ffn_down.weight"].encoding == "i2_s"
    pack(tmp_path / "ternary.gguf", tmp_path / "copy.gguf", "stored")
    assert (tmp_path / "copy.gguf").read_bytes() == (tmp_path / "ternary.gguf").read_bytes()


@pytest.mark.parametrize("source", ["qwen3", "qwen3.gguf"])
def test_the_first_layers_alone_can_be_packed(source: str, tmp_path: Path) -> None:
    pack(TINY / source, tmp_path / "cut.gguf", "stored", "model.num_hidden_layers=1")
    tensors, fields = read(tmp_path / "cut.gguf")
    assert fields["qwen3.block_count"] == 1
    assert not any(name.startswith("blk.1.") for name in tensors)
    logits_of(tmp_path / "cut.gguf", [1, 2, 3])


def test_random_weights_can_be_packed(tmp_path: Path) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 8}
    overrides = [f"model.random_config.{key}={value}" for key, value in sizes.items()]
    settings = compose_settings(["model=llama3", "model.checkpoint=random:", "model.num_hidden_layers=1", *overrides])
    model = open_model(settings.model, 0, tmp_path, lambda *_: None)
    packed = list(Packer(model, "q4_k").pack(tmp_path / "random.gguf", lambda *_: None))
    assert {one.entry.encoding for one in packed} == {"q4_k", "q6_k", "f32"}
    logits_of(tmp_path / "random.gguf", [1, 2, 3])


SMALL_DELTA = {  # value heads are twice the key heads, so that a GGUF file has rows and columns in another order
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def test_random_packed_weights_whose_numbers_change_places_stay_packed(tmp_path: Path) -> None:
    overrides = [f"model.random_config.{key}={value}" for key, value in SMALL_DELTA.items()]
    asked = ["model=qwen3_5", "model.checkpoint=random:q4_k", "model.num_hidden_layers=4", *overrides]
    model = open_model(compose_settings(asked).model, 0, tmp_path, lambda *_: None)
    packed = list(Packer(model, "stored").pack(tmp_path / "random.gguf", lambda *_: None))
    matrices = {one.entry.name: one.entry.encoding for one in packed if len(one.entry.shape) > 1}
    small = {name: matrices.pop(name) for name in list(matrices) if "ssm_alpha" in name or "ssm_beta" in name}
    assert {encoding for name, encoding in matrices.items() if "ssm_conv1d" not in name} <= {"q4_k", "q6_k"}
    assert {"blk.0.ssm_out.weight", "blk.0.attn_qkv.weight", "blk.3.attn_q.weight"} <= matrices.keys()
    assert len(small) == 6
    logits_of(tmp_path / "random.gguf", [1, 2, 3])


def add_tokenizer_with_merges(folder: Path, adds_bos: bool = False) -> None:
    add_tokenizer(folder, adds_bos)
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = spec["model"]["vocab"]
    vocab["th"], vocab["the"] = vocab.pop("~"), vocab.pop("`")
    spec["model"]["merges"] = [["t", "h"], ["th", "e"]]
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_becomes_the_same_tokens(tmp_path: Path, adds_bos: bool) -> None:
    folder = save_chat_folder(tmp_path / "hf")  # whose model has 96 rows
    add_tokenizer_with_merges(folder, adds_bos)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "bos_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}),
        encoding="utf-8",
    )
    pack(folder, tmp_path / "packed.gguf", "q8_0")
    source, packed = open_path(folder).tokenizer, open_path(tmp_path / "packed.gguf").tokenizer
    assert source is not None
    assert packed is not None
    for text in (*PROBES, "a <|end|> b"):
        assert packed.encode(text) == source.encode(text)
    messages = [{"role": "user", "content": "Hi <|end|>"}]
    assert packed.encode_chat(messages) == source.encode_chat(messages)
    assert (packed.bos_token_id, packed.eos_token_ids) == (source.bos_token_id, source.eos_token_ids)


@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
def test_a_mixture_of_experts_stored_one_by_one_keeps_its_tokenizer(tmp_path: Path, is_file: bool) -> None:
    qwen_moe_files.save(tmp_path, qwen_moe_files.build(), is_fused=False)
    add_tokenizer_with_merges(tmp_path)
    source = tmp_path / "model.safetensors" if is_file else tmp_path
    pack(source, tmp_path / "packed.gguf", "q8_0")
    packed = open_path(tmp_path / "packed.gguf").tokenizer
    assert packed is not None
    assert packed.encode("the other") == open_path(source).tokenizer.encode("the other")


def llama_cpp_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Return llama.cpp's logits on the CPU with a float32 cache: [T, V]."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install -e '.[peers]')")
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    float32 = 0
    model = llama_cpp.Llama(
        str(path), n_ctx=64, n_batch=64, logits_all=True, n_threads=1, type_k=float32, type_v=float32, verbose=False
    )
    model.eval(tokens)
    logits = np.array(model.scores[: len(tokens)])
    model.close()
    return logits


# llama.cpp takes GELU from a table in half precision and rounds activations to 8 bits where weights are packed.
BOUNDS = {
    "f32": {"llama3": 1e-5, "qwen3": 1e-5, "gpt2": 1e-3, "gemma3": 3e-3},
    "q8_0": 0.1,
    "q4_k": 0.1,
}


@pytest.mark.parametrize("asked", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("name", GOLDEN)
def test_llama_cpp_answers_as_graphcore_does_on_the_same_file(name: str, asked: str, tmp_path: Path) -> None:
    path, tokens = tmp_path / "packed.gguf", LOGITS["tokens"].tolist()
    pack(TINY / name, path, asked)
    theirs, ours = llama_cpp_logits(path, tokens), logits_of(path, tokens).numpy()
    bound = BOUNDS[asked]
    assert np.abs(theirs - ours).max() < (bound[name] if isinstance(bound, dict) else bound)


@pytest.mark.parametrize(("name", "bound"), [("gemma4", 6e-3), ("gemma4_dense", 3e-3), ("gemma4_moe", 3e-3)])
def test_llama_cpp_answers_as_graphcore_does_for_gemma_4(
    name: str, bound: float, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """Bounds are of the largest logit; layers with features have a second GELU, which llama.cpp rounds."""
    tiny, path = tiny_model(name), tmp_path / "packed.gguf"
    pack(tiny.folder, path, "f32")
    tokens = tiny.ids[0, :40].tolist()
    ours = logits_of(path, tokens).numpy()
    assert np.abs(llama_cpp_logits(path, tokens) - ours).max() < bound * np.abs(ours).max()


def save_with_wide_gates(source: Path, folder: Path) -> None:
    """Copy a checkpoint, and make what goes into its GELUs 10,000 times as large."""
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if "gate_proj" in name or "per_layer_input_gate" in name or ".c_fc." in name:
            tensor *= 1e4
        elif name.endswith("experts.gate_up_proj"):
            tensor.chunk(2, dim=1)[0].mul_(1e4)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", folder)


@pytest.mark.parametrize(
    ("name", "bound"),
    [("gemma3", 1e-5), ("gemma4", 4e-5), ("gemma4_dense", 1e-5), ("gemma4_moe", 1e-5), ("gpt2", 1e-5)],
)
def test_llama_cpp_answers_as_graphcore_does_where_it_does_not_round_gelu(
    name: str, bound: float, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """llama.cpp looks GELU up in a table of float16 between -10 and 10, and computes it elsewhere.

    Its logits of models whose gates lie elsewhere are graphcore's, so the table alone makes the other tests' bounds
    wide. Bounds are of the largest logit. Float32's own rounding explains 2e-5 of it where scores are not scaled.
    """
    source = tiny_model(name).folder if name.startswith("gemma4") else TINY / name
    save_with_wide_gates(source, tmp_path / "wide")
    path, tokens = tmp_path / "packed.gguf", LOGITS["tokens"].tolist()
    pack(tmp_path / "wide", path, "f32")
    ours = logits_of(path, tokens).numpy()
    error = np.abs(llama_cpp_logits(path, tokens) - ours).max() / np.abs(ours).max()
    print(f"\n{name}: {error:.1e} of the largest logit")
    assert error < bound


@pytest.mark.parametrize(("asked", "bound"), [("stored", 1e-5), ("f32", 1e-5), ("q8_0", 3e-2)])
def test_a_gpt_oss_folder_becomes_a_file_with_its_experts_as_they_are_stored(
    asked: str, bound: float, tmp_path: Path
) -> None:
    pack(TINY / "gptoss", tmp_path / "packed.gguf", asked)
    tokens = LOGITS["tokens"].tolist()
    found = logits_of(tmp_path / "packed.gguf", tokens).numpy()
    assert np.abs(found - LOGITS["gptoss.hf_logits"]).max() < bound
    if asked != "stored":
        return
    (tensors, _), (expected, _) = read(tmp_path / "packed.gguf"), read(TINY / "gptoss.gguf")
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensors[key].tensor_type == tensor.tensor_type, key
        assert np.array_equal(tensors[key].data, tensor.data), key
    theirs = llama_cpp_logits(tmp_path / "packed.gguf", tokens)
    assert np.abs(theirs - found).max() < 5e-2  # it rounds activations to 8 bits before mxfp4, and YaRN's bounds


@pytest.mark.parametrize("is_fused", [False, True], ids=["one_by_one", "fused"])
def test_a_mixture_becomes_the_file_that_llama_cpps_converter_makes(is_fused: bool, tmp_path: Path) -> None:
    model = qwen_moe_files.build()
    qwen_moe_files.save(tmp_path, model, is_fused)
    pack(tmp_path, tmp_path / "packed.gguf", "stored")
    expected_path = qwen_moe_files.write_gguf(tmp_path / "expected.gguf", model, None, is_fused=False)
    (tensors, fields), (expected, wanted) = read(tmp_path / "packed.gguf"), read(expected_path)
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensors[key].tensor_type == tensor.tensor_type
        assert np.array_equal(tensors[key].data, tensor.data), key
    assert {key: fields.get(key) for key in wanted if key.startswith("qwen3moe.")} == {
        key: value for key, value in wanted.items() if key.startswith("qwen3moe.")
    }


@pytest.mark.parametrize(("asked", "bound"), [("f32", 1e-5), ("q8_0", 0.2), ("q4_k", 0.2)])
def test_llama_cpp_answers_as_graphcore_does_on_a_mixture(asked: str, bound: float, tmp_path: Path) -> None:
    """Rounded activations change the shares, too: 0.06 and 0.10 were measured, at logits of order one."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    qwen_moe_files.save(tmp_path, qwen_moe_files.build(**sizes), is_fused=False)
    add_tokenizer_with_merges(tmp_path)
    path, tokens = tmp_path / "packed.gguf", [5, 17, 3, 88, 41, 2, 60, 9, 9, 71]
    pack(tmp_path, path, asked)
    assert np.abs(llama_cpp_logits(path, tokens) - logits_of(path, tokens).numpy()).max() < bound


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_llama_cpp_answers_as_graphcore_does_on_a_delta_rule(name: str, tmp_path: Path) -> None:
    """llama.cpp takes heads of one width for keys and values."""
    model = qwen_delta_files.build(name, 1, linear_key_head_dim=16, linear_value_head_dim=16)
    model.save_pretrained(tmp_path)
    path, tokens = tmp_path / "packed.gguf", [5, 17, 3, 88, 41, 2, 60, 9, 9, 71]
    pack(tmp_path, path, "f32")
    ours = logits_of(path, tokens).numpy()
    assert np.abs(llama_cpp_logits(path, tokens) - ours).max() < 1e-5 * np.abs(ours).max()


def test_every_format_can_be_written_and_read(tmp_path: Path) -> None:
    for asked in packable_names():
        pack(TINY / "gpt2", tmp_path / f"{asked}.gguf", asked)
        assert logits_of(tmp_path / f"{asked}.gguf", [1, 2, 3]).isfinite().all()
