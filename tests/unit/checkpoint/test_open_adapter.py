"""The readers of LoRA adapters: what they find in PEFT's folders and in GGUF files, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch
from support.files.adapter_files import WRAPPER, drawn, write_gguf_adapter, write_peft

from graphcore.checkpoint.open_checkpoint import open_adapter
from graphcore.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError

Q = "model.layers.0.self_attn.q_proj"
FACTORS = drawn({Q: (6, 5), "model.layers.1.mlp.up_proj": (7, 5)}, rank=4)


def scales(path: Path) -> dict[str, float]:
    return {pair.module: pair.scale for pair in open_adapter(path).pairs}


@pytest.mark.parametrize("infix", ["", ".default", ".my_name"])
def test_a_folder_s_factors_are_found(tmp_path: Path, infix: str) -> None:
    adapter = open_adapter(write_peft(tmp_path, FACTORS, infix, lora_alpha=6))
    assert (adapter.layout, adapter.architecture, adapter.weight) == ("hf", "", 1.0)
    assert [(pair.module, pair.rank, pair.scale) for pair in adapter.pairs] == [(name, 4, 1.5) for name in FACTORS]
    pair = adapter.pairs[0]
    assert (pair.a.shape, pair.b.shape) == ((4, 5), (6, 4))
    assert set(adapter.files) == {tmp_path / "adapter_model.safetensors"}
    assert open_adapter(tmp_path / "adapter_model.safetensors").pairs == adapter.pairs


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 6}, 1.5),
        ({"lora_alpha": 6, "use_rslora": True}, 3.0),
        ({"lora_alpha": 0}, 0.0),
        ({"lora_alpha": 6, "alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"lora_alpha": 6, "alpha_pattern": {"layers.0.self_attn.q_proj": 2.0}}, 0.5),
        ({"lora_alpha": 6, "alpha_pattern": {r"layers\.\d\.self_attn\..*": 2}}, 0.5),
        ({"lora_alpha": 6, "alpha_pattern": {"_proj": 2}}, 1.5),  # a pattern is a whole part of the name
        ({"lora_alpha": 6, "alpha_pattern": {"up_proj": 2, "k_proj": 1}}, 1.5),
        ({"lora_alpha": 6, "rank_pattern": {"q_proj": 4}, "r": 4}, 1.5),
        ({"lora_alpha": 6, "fan_in_fan_out": True, "bias": "all", "lora_dropout": 0.1, "target_modules": "x"}, 1.5),
        ({"lora_alpha": 6, "init_lora_weights": "gaussian", "modules_to_save": [], "use_dora": False}, 1.5),
    ],
)
def test_the_scale_follows_alpha_rank_and_patterns(tmp_path: Path, config: dict[str, object], scale: float) -> None:
    assert scales(write_peft(tmp_path, FACTORS, **config))[Q] == scale


def test_ranks_differ_by_pattern(tmp_path: Path) -> None:
    factors = {**drawn({Q: (6, 5)}, rank=2), **drawn({"model.layers.1.mlp.up_proj": (7, 5)}, rank=8)}
    path = write_peft(tmp_path, factors, r=2, rank_pattern={"mlp.up_proj": 8}, lora_alpha=4)
    assert scales(path) == {Q: 2.0, "model.layers.1.mlp.up_proj": 0.5}


def test_defaults_are_pefts(tmp_path: Path) -> None:
    write_peft(tmp_path, drawn({Q: (6, 5)}, rank=8))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert scales(tmp_path) == {Q: 1.0}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and only LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, r"has DoRA \(use_dora\)"),
        ({"use_qalora": True}, "QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"arrow_config": {"top_k": 1}}, "routing between adapters"),
        ({"kasa_config": {"beta": 1}}, "KaSA"),
        ({"monteclora_config": {"x": 1}}, "MonteCLoRA"),
        ({"layer_replication": [[0, 1]]}, "replicated layers"),
        ({"target_parameters": ["experts.gate_up_proj"]}, r"experts \(target_parameters\)"),
        ({"trainable_token_indices": [3]}, "rows of the embedding"),
        ({"modules_to_save": ["lm_head"]}, r"whole modules beside the factors \(modules_to_save\)"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' begins with another base model"),
        ({"init_lora_weights": "pissa_niter_4"}, "begins with another base model"),
        ({"init_lora_weights": "olora"}, "begins with another base model"),
        ({"init_lora_weights": "loftq"}, "begins with another base model"),
        ({"init_lora_weights": "of the future"}, "begins with another base model"),
    ],
)
def test_variants_are_refused_by_name(tmp_path: Path, config: dict[str, object], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        open_adapter(write_peft(tmp_path, FACTORS, **config))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"lora_alpha": "8"}, "lora_alpha is '8', not a number"),
        ({"lora_alpha": True}, "lora_alpha is True, not a number"),
        ({"r": None}, "r is None, not a number"),
        ({"alpha_pattern": [1]}, r"alpha_pattern is \[1\], not an object"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: q_proj is None, not a number"),
        ({"alpha_pattern": {"(": 1}}, r"the pattern '\(' is no regular expression"),
        ({"r": 5}, rf"says rank 5 for '{Q}', whose factors have rank 4"),
        ({"rank_pattern": {"q_proj": 3}}, rf"says rank 3 for '{Q}', whose factors have rank 4"),
    ],
)
def test_a_damaged_config_is_a_checkpoint_error(tmp_path: Path, config: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        open_adapter(write_peft(tmp_path, FACTORS, **config))


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    write_peft(tmp_path, FACTORS)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": Infinity}')
    with pytest.raises(CheckpointError, match="lora_alpha is inf, not a number"):
        open_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.embed_tokens.lora_embedding_A", "changes the embedding, which adapters here cannot"),
        (f"{Q}.lora_magnitude_vector", "is a magnitude of DoRA"),
        (f"{Q}.lora_magnitude_vector.weight", "is a magnitude of DoRA"),
        (f"{Q}.base_layer.bias", "is a bias"),
        (f"{Q}.lora_B.bias", "is a bias"),
        ("lm_head.weight", "is no LoRA factor of a matrix"),
        (f"{Q}.lora_ga.weight", "is no LoRA factor"),
        ("model.layers.0.mlp.experts.3.up_proj.lora_A.weight", "changes experts"),
        ("model.layers.0.mlp.experts.lora_A.weight", "changes experts"),
    ],
)
def test_tensors_that_are_no_factors_are_refused_by_name(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        open_adapter(write_peft(tmp_path, FACTORS, extra={WRAPPER + name: torch.zeros(4, 5)}))


def test_factors_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    a, b = FACTORS[Q]
    with pytest.raises(CheckpointError, match=r"do not fit: A is \[4, 5\], B is \[6, 3\]"):
        open_adapter(write_peft(tmp_path, {Q: (a, b[:, :3])}))
    with pytest.raises(CheckpointError, match=r"do not fit: A is \[4, 5, 1\]"):
        open_adapter(write_peft(tmp_path, {Q: (a[..., None], b)}))
    with pytest.raises(CheckpointError, match="has a factor A and no B; the file is incomplete"):
        open_adapter(write_peft(tmp_path, {}, extra={f"{WRAPPER}{Q}.lora_A.weight": a}, r=4))
    with pytest.raises(CheckpointError, match="has a factor B and no A"):
        open_adapter(write_peft(tmp_path, {}, extra={f"{WRAPPER}{Q}.lora_B.weight": b}, r=4))
    with pytest.raises(CheckpointError, match=f"two factors A of '{Q}'"):
        open_adapter(write_peft(tmp_path, {Q: (a, b)}, extra={f"{WRAPPER}{Q}.lora_A.default.weight": a.clone()}))
    with pytest.raises(CheckpointError, match="holds i64, not weights"):
        open_adapter(write_peft(tmp_path, {Q: (a.long(), b)}))
    with pytest.raises(CheckpointError, match="holds no LoRA factors"):
        open_adapter(write_peft(tmp_path, {}))


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such file"):
        open_adapter(tmp_path / "absent")
    with pytest.raises(CheckpointNotFoundError, match=r"has no adapter_config\.json; an adapter is PEFT"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(CheckpointNotFoundError, match=r"has no adapter_model\.safetensors"):
        open_adapter(tmp_path)
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="is a pickle"):
        open_adapter(tmp_path)


BLK = "blk.0.attn_q"
GGUF_FACTORS = drawn({BLK: (6, 32)}, rank=4)


def test_a_gguf_file_s_factors_are_found(tmp_path: Path) -> None:
    adapter = open_adapter(write_gguf_adapter(tmp_path / "a.gguf", GGUF_FACTORS, "qwen3", alpha=6.0))
    assert (adapter.layout, adapter.architecture) == ("gguf", "qwen3")
    (pair,) = adapter.pairs
    assert (pair.module, pair.a.shape, pair.b.shape, pair.scale) == (BLK, (4, 32), (6, 4), 1.5)


def test_an_alpha_of_0_stands_for_no_scale_as_in_llama_cpp(tmp_path: Path) -> None:
    assert scales(write_gguf_adapter(tmp_path / "a.gguf", GGUF_FACTORS, alpha=0.0)) == {BLK: 1.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "control"}, "is an adapter of type 'control', and only LoRA"),
        ({"general": "model"}, "is no adapter .* model.checkpoint="),
        ({"alpha": None}, "adapter.lora.alpha is None, not a number"),
        ({"alpha": float("nan")}, "adapter.lora.alpha is nan, not a number"),
        ({"extra": {"blk.0.attn_norm.weight": torch.zeros(4)}}, "'blk.0.attn_norm.weight' is no LoRA factor"),
        ({"extra": {"blk.0.ffn_up_exps.weight.lora_a": torch.zeros(2, 4)}}, "changes experts"),
        ({"extra": {"blk.0.attn_k.weight.lora_a": torch.zeros(2, 4)}}, "'blk.0.attn_k' has a factor A and no B"),
        ({"extra": {"blk.0.attn_k.weight.lora_b": torch.zeros(2, 4)}}, "'blk.0.attn_k' has a factor B and no A"),
    ],
)
def test_gguf_files_are_refused_by_name(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        open_adapter(write_gguf_adapter(tmp_path / "a.gguf", GGUF_FACTORS, **changes))


def test_activated_lora_in_a_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has activated LoRA"):
        open_adapter(write_gguf_adapter(tmp_path / "a.gguf", GGUF_FACTORS, invocation=[1, 2]))


@pytest.mark.parametrize(
    ("key", "says"), [(b"adapter.type", "is an adapter of type None"), (b"general.architecture", "lacks general.arch")]
)
def test_a_gguf_file_that_lacks_a_key_is_refused(tmp_path: Path, key: bytes, says: str) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", GGUF_FACTORS)
    path.write_bytes(path.read_bytes().replace(key, key[:-1] + b"_"))
    with pytest.raises(CheckpointError, match=says):
        open_adapter(path)


def test_settings_that_are_no_numbers_or_flags_are_named(tmp_path: Path) -> None:
    for config in ({"lora_alpha": 10**400}, {"lora_alpha": 1e300}, {"use_rslora": "false"}):
        (name,) = config
        with pytest.raises(CheckpointError, match=f"{name} is .*save the adapter again"):
            open_adapter(write_peft(tmp_path, FACTORS, **config))


@pytest.mark.parametrize("shape", [(), (4,), (0, 5), (4, 5, 1)])
def test_factors_of_other_shapes_are_shown(tmp_path: Path, shape: tuple[int, ...]) -> None:
    factors = {Q: (torch.zeros(shape), torch.zeros(6, shape[0] if shape else 4))}
    folder = write_peft(tmp_path, {"model.layers.0.mlp.up_proj": FACTORS["model.layers.1.mlp.up_proj"], **factors})
    with pytest.raises(CheckpointError, match=r"do not fit: A is .*, B is "):
        open_adapter(folder)
