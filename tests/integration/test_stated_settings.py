"""Models whose files state less, or more, than graphcore's own would: they compute what the peers compute.

Folders are compared with transformers. GGUF files are compared with transformers' model of the same settings, and with
llama.cpp where llama-cpp-python is installed.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.files.llama_files import build, write_gguf
from support.tiny_models import VOCAB

from graphcore import Engine
from graphcore.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.thorough

TOKENS = 200
IDS = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(3))
TOLERANCE = 5e-5  # float32 against float32, logits of order one
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOW = 8


def load(path: Path, context: int | None = 256) -> Engine:
    overrides = [] if context is None else [f"context_length={context}"]
    return Engine.load(path, dtype="fp32", device="cpu", graph="eager", overrides=overrides)


def error(engine: Engine, reference: torch.nn.Module) -> float:
    """Return the largest difference from transformers' logits, and check that these vary."""
    expected = reference(input_ids=IDS, use_cache=False).logits
    assert expected.std() > 0.3
    return (engine.logits(IDS) - expected).abs().max().item()


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 64}},  # the recipe of Qwen 2.5
        {"rope_scaling": YARN},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 64.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
        {"rope_scaling": LLAMA3},
    ],
    ids=str,
)
def test_a_scaled_model_runs_to_factor_times_its_original_context(tmp_path: Path, settings: dict) -> None:
    reference = build("qwen2", max_position_embeddings=64, **json.loads(json.dumps(settings)))
    reference.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps({**raw, **settings}))
    with load(tmp_path) as engine:
        assert error(engine, reference) < TOLERANCE
        assert engine.choices.context_length == 256
    longest = int(64 * settings["rope_scaling"]["factor"])
    with pytest.raises(ConfigError, match=f"context_length=1000, but the model was made for {longest} tokens"):
        load(tmp_path, 1000)


@pytest.mark.parametrize("rope", [YARN, {"type": "linear", "factor": 4.0}, {"type": "dynamic", "factor": 4.0}], ids=str)
def test_transformers_own_classes_run_to_the_extended_context_too(tmp_path: Path, rope: dict) -> None:
    reference = build("llama", max_position_embeddings=64, rope_scaling=dict(rope))
    reference.save_pretrained(tmp_path)
    overrides = ["model.fallback=transformers", "context_length=256"]
    with Engine.load(tmp_path, dtype="fp32", device="cpu", overrides=overrides) as engine:
        assert error(engine, reference) < TOLERANCE


@pytest.mark.parametrize("fallback", [False, True], ids=["own", "transformers"])
def test_no_generation_config_keeps_a_model_from_running(tmp_path: Path, fallback: bool) -> None:
    reference = build("llama")
    reference.save_pretrained(tmp_path)
    overrides = ["model.fallback=transformers"] if fallback else []
    for text, ends in (("", set()), ("null", set()), ('{"eos_token_id": ["2", null, -1, 3.0,], "top_p": NaN}', {2, 3})):
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
        with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=overrides) as engine:
            assert engine.loaded.end_ids == ends
            notes = [note for note in engine.notes if "generation_config.json" in note]
            assert len(notes) == (2 if ends else 1)  # the number that is none, and the id that is none


@pytest.mark.parametrize("fallback", [False, True], ids=["own", "transformers"])
@pytest.mark.parametrize("left", [{}, {"load_in_4bit": False, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}])
def test_a_quantization_config_left_over_full_weights_is_ignored_with_a_note(
    tmp_path: Path, left: dict, fallback: bool
) -> None:
    build("llama").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "bitsandbytes", **left}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    overrides = ["model.fallback=transformers"] if fallback else []
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=overrides) as engine:
        assert error(engine, reference) < TOLERANCE
        assert any("quantization_config is ignored" in note for note in engine.notes)


@pytest.mark.parametrize("flag", ["load_in_4bit", "load_in_8bit"])
def test_a_quantization_config_that_is_on_is_refused_over_full_weights(tmp_path: Path, flag: str) -> None:
    build("llama").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "bitsandbytes", flag: True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"the config says that weights are quantised .*, and none is; remove"):
        load(tmp_path)


@pytest.mark.parametrize("fallback", [False, True], ids=["own", "transformers"])
def test_weights_that_are_quantised_are_refused_whatever_the_flags_say(tmp_path: Path, fallback: bool) -> None:
    build("llama").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones_like(
        tensors["model.layers.0.self_attn.q_proj.weight"], dtype=torch.int8
    )
    save_file(tensors, tmp_path / "model.safetensors")
    overrides = ["model.fallback=transformers"] if fallback else []
    with pytest.raises(CheckpointError, match=r"q_proj\.weight.*(i8|I8|int8)"):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=overrides)


@pytest.mark.parametrize("fallback", [False, True], ids=["own", "transformers"])
def test_more_stored_layers_than_the_config_says_are_named_as_the_cause(tmp_path: Path, fallback: bool) -> None:
    build("llama").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    layers = raw.pop("num_hidden_layers")
    raw.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 1}))
    overrides = ["model.fallback=transformers"] if fallback else []
    says = f"num_hidden_layers in config.json says 1 layers, the weights have {layers}: correct it"
    with pytest.raises(CheckpointError, match=says):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=overrides)


def test_dynamic_scaling_runs_to_where_it_changes_nothing(tmp_path: Path) -> None:
    reference = build("llama", max_position_embeddings=256, rope_scaling={"type": "dynamic", "factor": 2.0})
    reference.save_pretrained(tmp_path)
    with load(tmp_path) as engine:
        assert error(engine, reference) < TOLERANCE
        assert any("rope_type 'dynamic' changes nothing up to" in note for note in engine.notes)
    with pytest.raises(ConfigError, match=r"made for 256 tokens; .* set model\.fallback=transformers$"):
        load(tmp_path, 257)


ORIGINAL = {"rope__scaling__original_context_length": 64}
YARN_KEYS = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
SCALED = [
    (YARN, YARN_KEYS),
    (YARN, {**YARN_KEYS, **ORIGINAL}),
    (YARN, {**YARN_KEYS, "rope__scaling__original_context_length": 0}),
    ({**YARN, "original_max_position_embeddings": 32}, {**YARN_KEYS, "rope__scaling__original_context_length": 32}),
    (YARN, {"rope__scaling__type": "yarn", "rope__scale_linear": 4.0}),
    (None, {"rope__scaling__type": "yarn"}),
    ({"rope_type": "linear", "factor": 4.0}, {"rope__scaling__factor": 4.0}),
]


@pytest.mark.parametrize(("rope", "keys"), SCALED, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_gguf_file_s_scaling_has_llama_cpp_s_defaults(tmp_path: Path, name: str, rope: dict, keys: dict) -> None:
    reference = build(name, max_position_embeddings=64, rope_scaling=rope and dict(rope))
    file = write_gguf(tmp_path / "model.gguf", reference, name, **keys)
    longest = 64 if rope is None else 128 if "original_max_position_embeddings" in rope else 256
    with load(file, longest) as engine:
        ids = IDS[:, :longest]
        expected = reference(input_ids=ids, use_cache=False).logits
        assert (engine.logits(ids) - expected).abs().max() < TOLERANCE
    with pytest.raises(ConfigError, match=f"made for {longest} tokens"):
        load(file, longest + 1)


def test_a_llama_file_with_a_window_is_a_mistral_all_of_whose_layers_slide(tmp_path: Path) -> None:
    reference = build("mistral", sliding_window=WINDOW)
    file = write_gguf(tmp_path / "model.gguf", reference, "llama", attention__sliding_window=WINDOW)
    with load(file) as engine:
        assert error(engine, reference) < TOLERANCE
        assert engine.config.model_type == "mistral"
        assert any("every layer slides, as in transformers' mistral" in note for note in engine.notes)
    for none in (0, 2**32 - 1):
        unbounded = write_gguf(tmp_path / "full.gguf", reference, "llama", attention__sliding_window=none)
        with load(unbounded) as engine:
            assert error(engine, reference) > 0.1
            assert error(engine, build("mistral", sliding_window=None)) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_window_that_the_type_does_not_use_is_ignored_with_a_note(tmp_path: Path, name: str) -> None:
    """llama.cpp does not read the key, and transformers' class has use_sliding_window=False."""
    reference = build(name)
    file = write_gguf(tmp_path / "model.gguf", reference, name, attention__sliding_window=WINDOW)
    with load(file) as engine:
        assert error(engine, reference) < TOLERANCE
        assert any(f"{name}.attention.sliding_window is 8, which is ignored" in note for note in engine.notes)


def test_a_gemma3_file_without_a_window_has_full_attention(tmp_path: Path) -> None:
    """llama.cpp's rule (gemma3.cpp): no window, no sliding layers, and their theta is not used."""
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    full = {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 16, "rope_parameters": rope}
    reference = build("gemma3", tie_word_embeddings=True, **full)
    for keys in ({}, {"attention__sliding_window": 0}):
        with load(write_gguf(tmp_path / "model.gguf", reference, "gemma3", **keys)) as engine:
            assert error(engine, reference) < TOLERANCE


def logits_of_llama_cpp(path: Path, ids: list[int]) -> np.ndarray:
    """Return llama.cpp's logits of all positions, [T, V], with a context that holds them."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install -e '.[peers]')")
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model, "llama.cpp refuses the file"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = 1
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = token, at, 1, 0, 1
    assert llama_cpp.llama_decode(context, batch) == 0
    found = llama_cpp.llama_get_logits(context)
    logits = np.ctypeslib.as_array(found, shape=(len(ids), VOCAB)).copy()
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return logits


LLAMA_CPP_TOLERANCE = 2e-2  # its attention keeps keys and values in float16


@pytest.mark.parametrize(("rope", "keys"), SCALED, ids=str)
def test_llama_cpp_computes_the_same_with_these_scalings(tmp_path: Path, rope: dict, keys: dict) -> None:
    reference = build("llama", max_position_embeddings=64)
    file = write_gguf(tmp_path / "model.gguf", reference, "llama", **keys)
    ids = IDS[:, : 64 if rope is None else 128]
    theirs = logits_of_llama_cpp(file, ids[0].tolist())
    with load(file, None) as engine:
        assert np.abs(engine.logits(ids)[0].numpy() - theirs).max() < LLAMA_CPP_TOLERANCE


def test_llama_cpp_ignores_windows_where_the_notes_say_so(tmp_path: Path) -> None:
    for name in ("llama", "qwen2", "qwen3"):
        reference = build(name)
        file = write_gguf(tmp_path / "model.gguf", reference, name, attention__sliding_window=WINDOW)
        theirs = logits_of_llama_cpp(file, IDS[0].tolist())
        full = reference(input_ids=IDS, use_cache=False).logits[0].numpy()
        assert np.abs(full - theirs).max() < LLAMA_CPP_TOLERANCE


def test_llama_cpp_gives_a_gemma3_file_without_a_window_full_attention(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    full = {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 16, "rope_parameters": rope}
    reference = build("gemma3", tie_word_embeddings=True, **full)
    theirs = logits_of_llama_cpp(write_gguf(tmp_path / "model.gguf", reference, "gemma3"), IDS[0].tolist())
    ours = reference(input_ids=IDS, use_cache=False).logits[0].numpy()
    assert np.abs(ours - theirs).max() < LLAMA_CPP_TOLERANCE
