"""What model.fallback=transformers refuses, and what its plan says."""

import json
from pathlib import Path

import pytest
import torch
from support.fallback_models import save_fallback

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.fallback.transformers_loader import TransformersLoader
from graphcore.engine.loading.plan_run import plan_run
from graphcore.errors import CheckpointError, ConfigError, GraphcoreError, UnsupportedError

FALLBACK = "model.fallback=transformers"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fallback("phi3", tmp_path_factory.mktemp("phi3")).folder


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["graph=captured"], "graph=captured is not possible"),
        (["graph=compiled", "graph.prefill=compiled"], r"graph\.prefill=compiled is not possible"),
        (["graph=compiled", "graph.blocks=compiled"], r"graph\.blocks=compiled is not possible"),
        (["graph=compiled", "graph.artefacts=."], r"graph\.artefacts=\. is not possible"),
        (["quant=q8_0"], "quant=q8_0 is not possible"),
        (["quant.activations=int8"], r"quant\.activations=int8 is not possible"),
        (["kv_dtype=bf16"], "kv_dtype=bf16 is not possible"),
        (["dependent_launches=on"], "dependent_launches=on is not possible"),
        (["model.num_hidden_layers=2"], r"model\.num_hidden_layers=2 is not possible"),
        (["model.attention=flash_attention_2"], "runs on CUDA devices only, and this is cpu"),
        (["context_length=100000"], "the model was made for 512 tokens"),
    ],
)
def test_a_setting_that_cannot_have_its_effect_is_refused(folder: Path, keys: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Engine.load(folder, device="cpu", overrides=[FALLBACK, *keys])


def test_an_unknown_model_type_is_refused_with_the_option_that_runs_it(tmp_path: Path) -> None:
    folder = save_fallback("gpt_neox", tmp_path).folder
    with pytest.raises(UnsupportedError, match=r"'gpt_neox' is not supported.*with model\.fallback=transformers"):
        Engine.load(folder, device="cpu")


def test_attention_weights_need_eager_attention(folder: Path) -> None:
    with (
        Engine.load(folder, device="cpu", dtype="fp32", overrides=[FALLBACK]) as engine,
        pytest.raises(ConfigError, match=r"model\.attention=sdpa never has the attention weights.*=eager"),
    ):
        engine.logits([[1, 2, 3]], output_attentions=True)


def test_random_weights_and_gguf_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="random: makes weights of graphcore's own models"):
        Engine.load("random:", device="cpu", overrides=[FALLBACK])
    golden = Path(__file__).parents[3] / "golden" / "tiny" / "llama3.gguf"
    for source in (golden, "llama3"):  # the group's file of 4 bits is not downloaded for it
        with pytest.raises(UnsupportedError, match=r"not GGUF; .*model\.precision=full"):
            Engine.load(source, device="cpu", overrides=[FALLBACK])


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = save_fallback("phi3", tmp_path).folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="quantised"):
        Engine.load(folder, device="cpu", overrides=[FALLBACK])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{", encoding="utf-8"), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "phi3", "hidden_size": "x"}'), "config"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "model.safetensors"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(damage: object, says: str, tmp_path: Path) -> None:
    folder = save_fallback("phi3", tmp_path).folder
    damage(folder)
    with pytest.raises(GraphcoreError, match=says) as error:
        Engine.load(folder, device="cpu", overrides=[FALLBACK])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "setting", "value", "says"),
    [
        ("phi3", "num_hidden_layers", 10**9, r"states 1000000000 layers, and the files hold \d+ tensors"),
        ("phi3", "vocab_size", 10**9, "states vocab_size=1000000000, and no tensor has that many rows"),
        ("phi3", "hidden_size", 10**9, "states hidden_size=1000000000, and no tensor has that many rows"),
        ("phi3", "num_attention_heads", 0, r"cannot run it \(ZeroDivisionError"),
        ("phi3", "hidden_act", "x", r"cannot run it \(KeyError: 'x'\)"),
        ("phi3", "pad_token_id", 10**9, r"cannot run it \(AssertionError"),
        ("phi3", "dtype", "x", r"cannot run it \(AttributeError"),
        ("phi3", "dtype", [], r"cannot run it \(IndexError"),
        ("opt", "word_embed_proj_dim", 0, r"Missing required tensor: 'model\.decoder\.project_in"),
        ("gpt_neox", "rope_parameters.rope_type", "x", r"cannot run it \(KeyError: 'x'\)"),
        ("gpt_neox", "rope_parameters.rope_theta", None, r"cannot run it \(TypeError"),
        ("gpt_neox", "rope_parameters.partial_rotary_factor", -1, r"cannot run it \(RuntimeError"),
        (
            "gpt_neox",
            "rope_parameters.partial_rotary_factor",
            1e9,
            r"would compute 29\.8 GiB for its buffer",
        ),
    ],
)
def test_a_setting_that_means_nothing_is_refused_before_memory_is_taken(
    name: str, setting: str, value: object, says: str, tmp_path: Path
) -> None:
    folder = save_fallback(name, tmp_path).folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    *parents, leaf = setting.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    place[leaf] = value
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(GraphcoreError, match=says) as error:
        Engine.load(folder, device="cpu", overrides=[FALLBACK, "context_length=64"])
    assert "\n" not in str(error.value)
    assert ("cannot run it" not in says) or f"; model_type is '{name}': correct" in str(error.value)


@pytest.mark.parametrize(("name", "kind"), [("camembert", "TypeError"), ("bamba", "ValueError")])
def test_a_class_that_fails_in_the_first_pass_is_refused_with_the_model_type(
    name: str, kind: str, tmp_path: Path
) -> None:
    folder = save_fallback(name, tmp_path).folder
    says = rf"ForCausalLM: transformers \S+ cannot run it \({kind}: .*\); model_type is '{name}': correct the setting"
    with Engine.load(folder, device="cpu", overrides=[FALLBACK, "context_length=64"]) as engine:
        for call in (engine.logits, engine.generate):
            with pytest.raises(UnsupportedError, match=says):
                call([[5, 6, 7]])


def test_token_ids_that_end_a_generation_come_from_both_config_files(tmp_path: Path) -> None:
    folder = save_fallback("olmo2", tmp_path, eos_token_id=7).folder
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}', encoding="utf-8")
    with Engine.load(folder, device="cpu", overrides=[FALLBACK]) as engine:
        assert engine.loaded.end_ids == {5, 6, 7}


def test_a_plan_reads_no_weight_and_counts_every_byte_once(folder: Path) -> None:
    settings = compose_settings([FALLBACK, f"model.checkpoint={folder}", "device=cpu", "dtype=fp32"])
    backend = TransformersLoader()
    model = backend.open(settings, lambda *_: None)
    parts, plan, _ = plan_run(settings, backend.prepare(settings, model, lambda *_: None))
    assert all(weight.is_meta for weight in parts.weights.weights.values())
    stored = sum(info.nbytes for info in parts.loader.checkpoint.tensors.values())
    assert stored <= plan.weight_nbytes <= stored + 256 * len(parts.weights.weights)
    # keys and values: 3 layers, 2 heads of 16, 512 tokens, float32
    assert plan.kv_nbytes == 2 * 3 * 2 * 16 * 512 * 4


def test_a_tied_head_takes_no_bytes_of_its_own(tmp_path: Path) -> None:
    folder = save_fallback("bloom", tmp_path).folder
    with Engine.load(folder, device="cpu", dtype="fp32", overrides=[FALLBACK]) as engine:
        assert engine.plan.groups.group_nbytes[-1] == 0
        model = engine.runner.skeleton.model  # type: ignore[attr-defined]
        table, head = model.transformer.word_embeddings.weight, model.lm_head.weight
        assert table.data_ptr() == head.data_ptr()
        assert table is not head


def test_a_file_that_changes_between_plan_and_load_is_refused(tmp_path: Path) -> None:
    folder = save_fallback("stablelm", tmp_path).folder
    file = folder / "model.safetensors"

    def cut(stage: str, index: int, done: int, total: int) -> None:
        if stage == "load" and done < total // 2:
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)

    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Engine.load(folder, device="cpu", dtype="fp32", overrides=[FALLBACK], on_progress=cut)


def test_the_weights_that_stay_lie_in_one_allocation(folder: Path) -> None:
    with Engine.load(folder, device="cpu", dtype="fp32", overrides=[FALLBACK]) as engine:
        model = engine.runner.skeleton.model  # type: ignore[attr-defined]
        storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        assert len(storages) == 1
        assert all(weight.data_ptr() % 256 == 0 for weight in model.parameters())
        assert all(not torch.is_inference(weight) for weight in model.parameters())
