"""Which stored tensor becomes which weight: prefixes, heads, cut layers, and every refusal's message."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.cases import in_case
from support.fake_sources import GPT2, LLAMA, FakeCheckpoint, config_of, shapes_of, stored_gpt2, stored_tensors
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import Fold, InverseScale, ScaleOnly, SplitPairs, WithoutScale
from graphcore.arch.registry import architecture_of
from graphcore.errors import CheckpointError
from graphcore.weights.extra_tensors import notes_on_unused
from graphcore.weights.matching import match_weights

UNTIED, TIED = config_of(LLAMA), config_of(LLAMA, tie_word_embeddings=True)
GEMMA = config_of({**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "tie_word_embeddings": True})
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def match(
    config: ModelConfig, tensors: dict[str, Tensor], stored_layers: int = 2, layout: str = "hf"
) -> dict[str, TensorSource]:
    checkpoint = FakeCheckpoint(tensors, layout)
    return match_weights(architecture_of(config), config, checkpoint, shapes_of(config), stored_layers)


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_llama_is_found_under_either_prefix(prefix: str) -> None:
    sources = match(UNTIED, stored_tensors(UNTIED, prefix))
    assert sources.keys() == shapes_of(UNTIED).keys()
    assert sources["layers.1.self_attn.q_proj.weight"] == TensorSource(f"{prefix}layers.1.self_attn.q_proj.weight")
    assert sources["lm_head.weight"] == TensorSource("lm_head.weight")


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_gemma_is_found_inside_a_multimodal_model(prefix: str) -> None:
    tensors = stored_tensors(GEMMA, prefix) | {"vision_tower.embeddings.weight": torch.zeros(3)}
    sources = match(GEMMA, tensors)
    assert sources["norm.weight"].name == f"{prefix}norm.weight"
    assert sources["layers.0.self_attn.k_norm.weight"].name == f"{prefix}layers.0.self_attn.k_norm.weight"


def test_multimodal_head_is_found_under_its_own_prefix() -> None:
    tensors = stored_tensors(GEMMA, "language_model.model.")
    tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    assert match(GEMMA, tensors)["lm_head.weight"].name == "language_model.lm_head.weight"


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_is_found_under_either_prefix_and_its_mask_buffers_are_left_alone(prefix: str) -> None:
    config = config_of(GPT2)
    tensors = stored_gpt2(prefix) | {f"{prefix}h.0.attn.bias": torch.ones(1, 1, 12, 12)}
    sources = match(config, tensors)
    assert sources["layers.1.self_attn.v_proj.bias"].name == f"{prefix}h.1.attn.c_attn.bias"
    assert sources["lm_head.weight"] == sources["embed_tokens.weight"] == TensorSource(f"{prefix}wte.weight")


def test_decoder_s_own_names_need_no_map() -> None:
    sources = match(UNTIED, {name: torch.zeros(shape) for name, shape in shapes_of(UNTIED).items()}, layout="decoder")
    assert all(source == TensorSource(name) for name, source in sources.items())


def test_tied_head_without_a_tensor_reads_the_embedding() -> None:
    sources = match(TIED, without(stored_tensors(TIED), "lm_head.weight"))
    assert sources["lm_head.weight"] == sources["embed_tokens.weight"] == TensorSource("model.embed_tokens.weight")


def test_stored_head_of_a_tied_model_wins() -> None:
    assert match(TIED, stored_tensors(TIED))["lm_head.weight"] == TensorSource("lm_head.weight")


def test_untied_model_without_a_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"fake\.safetensors: Missing required tensor: 'lm_head\.weight'"):
        match(UNTIED, without(stored_tensors(UNTIED), "lm_head.weight"))


def test_missing_tensor_is_named_with_the_file() -> None:
    with pytest.raises(CheckpointError) as caught:
        match(UNTIED, without(stored_tensors(UNTIED), Q_PROJ))
    assert str(caught.value).startswith(f"fake.safetensors: Missing required tensor: '{Q_PROJ}';")
    assert "\n" not in str(caught.value)


def test_many_missing_tensors_are_named_in_part_and_counted() -> None:
    layer = [name for name in stored_tensors(UNTIED) if "layers.1." in name]
    with pytest.raises(CheckpointError, match=r"and 5 more;"):
        match(UNTIED, without(stored_tensors(UNTIED), *layer))


def test_tensor_that_nothing_reads_is_refused_by_name() -> None:
    cases = [
        "model.layers.0.self_attn.q_norm.weight",  # a qwen3 checkpoint under a llama config
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_proj.lora_A.weight",
        "model.layers.1.self_attn.q_proj.base_layer.weight",
        "model.layers.2.input_layernorm.weight",  # the config says two layers
        "model.layers.0.mlp.extra",
        "lm_head.lora_B.weight",
        "lora_A.default.weight",
        "lm_head.extra",
        "lm_head.modules_to_save.default.weight",
        "model.embed_tokens.lora_embedding_A",
        "prompt_encoder.embedding.weight",
        "lm_head.bias",
        "model.norm.bias",
        "lm_head.weight_scale",
        "final_logits_bias",
        "logit_scale",
        "model.embed_norm.weight",
        "model.project_in.weight",
        "embed_positions.weight",
    ]
    for name in cases:
        with in_case(name):
            with pytest.raises(CheckpointError) as caught:
                match(UNTIED, stored_tensors(UNTIED) | {name: torch.zeros(16)})
            assert str(caught.value).startswith(f"fake.safetensors: unexpected tensor '{name}'")


def test_what_lies_outside_the_model_is_left_out_with_a_note() -> None:
    cases = [
        {"v_head.summary.weight": (1, 16), "v_head.summary.bias": (1,)},  # trl
        {"value_head.0.weight": (16, 16), "value_head.0.bias": (16,), "value_head.2.weight": (1, 16)},
        {"score.weight": (2, 16)},  # a classifier of transformers
        {"reward_head.weight": (1, 16)},
        {"model.v_head.weight": (1, 16)},
        {"step": ()},
        {"global_step": (1,), "ema_decay": ()},
        {"optimizer.state.0.exp_avg": (16, 16)},
        {"model.layers.0.attn.masked_bias": ()},
        {"model.causal_mask": (8, 8), "model.position_ids": (1, 8)},
        {"model.layers.1.self_attn.rotary_emb.cos_cached": (8, 8), "model.rotary_emb.original_inv_freq": (4,)},
    ]
    for prefix, extra in product(["model.", ""], cases):
        with in_case(extra, prefix):
            plain = {
                name if prefix else name.removeprefix("model."): torch.zeros(shape) for name, shape in extra.items()
            }
            checkpoint = FakeCheckpoint(stored_tensors(UNTIED, prefix) | plain)
            architecture = architecture_of(UNTIED)
            sources = match_weights(architecture, UNTIED, checkpoint, shapes_of(UNTIED), 2)
            used = {source.name for source in sources.values()}
            (note,) = notes_on_unused(architecture, UNTIED, checkpoint, used, 2)
            assert note == f"left out of the checkpoint: {', '.join(repr(name) for name in sorted(plain))}"


def test_counters_are_whole_numbers_inside_the_model_too() -> None:
    match(UNTIED, stored_tensors(UNTIED) | {"model.batches": torch.zeros(4, dtype=torch.int64)})


def test_gguf_files_have_no_extra_tensors() -> None:
    gguf = {architecture_of(UNTIED).gguf_source(name, UNTIED).name: shape for name, shape in shapes_of(UNTIED).items()}
    tensors = {name: torch.zeros(shape) for name, shape in gguf.items()}
    with pytest.raises(CheckpointError, match="unexpected tensor 'step'"):
        match(UNTIED, tensors | {"step": torch.zeros(())}, layout="gguf")


@pytest.mark.parametrize("layout", ["hf", "gguf"])
def test_a_layer_that_the_counts_leave_out_must_be_one_of_multi_token_prediction(layout: str) -> None:
    trunk, config = config_of(LLAMA, num_hidden_layers=3), replace(UNTIED, num_predicting_layers=1)
    if layout == "hf":
        tensors, prefix, part = stored_tensors(trunk), "model.layers.", "eh_proj.weight"
        stale = "num_hidden_layers 2 and num_nextn_predict_layers 1 leave layer 2 out"
    else:
        source_of = architecture_of(trunk).gguf_source
        tensors = {source_of(name, trunk).name: torch.zeros(shape) for name, shape in shapes_of(trunk).items()}
        prefix, part = "blk.", "nextn.eh_proj.weight"
        stale = "block_count 3 and nextn_predict_layers 1 leave layer 2 out"
    absent = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{prefix}2.")}
    for name, stored in (("absent", absent), ("of prediction", tensors | {f"{prefix}2.{part}": torch.zeros(2, 2)})):
        assert match(config, stored, layout=layout), name
    with pytest.raises(CheckpointError, match=stale):
        match(config, tensors, layout=layout)
    with pytest.raises(CheckpointError, match=stale):  # also if only the first layer is to run
        match(replace(config, num_hidden_layers=1), tensors, layout=layout)


@pytest.mark.parametrize("wrapper", ["policy.", "llm.inner.", "module."])
@pytest.mark.parametrize("is_tied", [False, True])
def test_any_prefix_that_all_tensors_share_is_taken_off(wrapper: str, is_tied: bool) -> None:
    config = TIED if is_tied else UNTIED
    tensors = without(stored_tensors(config), *(["lm_head.weight"] if is_tied else []))
    sources = match(config, {wrapper + name: tensor for name, tensor in tensors.items()})
    assert sources["norm.weight"].name == f"{wrapper}model.norm.weight"
    assert sources["lm_head.weight"].name == wrapper + ("model.embed_tokens.weight" if is_tied else "lm_head.weight")


def test_a_prefix_of_some_tensors_is_refused() -> None:
    tensors = stored_tensors(UNTIED)
    tensors["policy." + Q_PROJ] = tensors.pop(Q_PROJ)
    with pytest.raises(CheckpointError, match="Missing required tensor"):
        match(UNTIED, tensors)


def test_a_fault_of_the_files_matters_only_for_a_needed_tensor() -> None:
    checkpoint = FakeCheckpoint(stored_tensors(UNTIED))
    checkpoint.faults = {"model.layers.0.self_attn.rotary_emb.inv_freq": "is in no shard"}
    architecture = architecture_of(UNTIED)
    sources = match_weights(architecture, UNTIED, checkpoint, shapes_of(UNTIED), 2)
    (note,) = notes_on_unused(architecture, UNTIED, checkpoint, {source.name for source in sources.values()}, 2)
    assert note.startswith(
        "files of the checkpoint contradict each other about tensors that the model does not need: 'model.layers.0."
    )
    checkpoint.faults = {Q_PROJ: "index: is in another shard"}
    with pytest.raises(CheckpointError, match="index: is in another shard"):
        match_weights(architecture, UNTIED, checkpoint, shapes_of(UNTIED), 2)


def test_inverse_frequencies_of_old_checkpoints_are_left_alone() -> None:
    match(UNTIED, stored_tensors(UNTIED) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})


def test_layers_that_were_cut_may_be_stored_and_others_may_not() -> None:
    whole = config_of(LLAMA, num_hidden_layers=4)
    cut = config_of(LLAMA, num_hidden_layers=2)
    assert match(cut, stored_tensors(whole), stored_layers=4).keys() == shapes_of(cut).keys()
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'model\.layers\.4\.norm\.weight'"):
        match(cut, stored_tensors(whole) | {"model.layers.4.norm.weight": torch.zeros(16)}, stored_layers=4)


def test_wrong_shape_is_told_with_file_tensor_expected_and_found() -> None:
    with pytest.raises(CheckpointError) as caught:
        match(UNTIED, stored_tensors(UNTIED) | {Q_PROJ: torch.zeros(16, 8)})
    message = str(caught.value)
    assert f"fake.safetensors: Shape mismatch for {Q_PROJ}: expected [16, 16]" in message
    assert "got [16, 8]" in message
    assert "\n" not in message


@pytest.mark.parametrize("shape", [(20, 16, 1), (320,), (), (16, 20), (0, 16)])
def test_embedding_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"Shape mismatch for model\.embed_tokens\.weight"):
        match(UNTIED, stored_tensors(UNTIED) | {"model.embed_tokens.weight": torch.zeros(shape)})


def test_shape_is_compared_after_the_folds() -> None:
    config = config_of(GPT2)
    with pytest.raises(CheckpointError) as caught:
        match(config, stored_gpt2() | {"h.0.mlp.c_fc.weight": torch.zeros(64, 16)})
    assert "expected [64, 16] for layers.0.mlp.up_proj.weight, got [64, 16], which becomes [16, 64]" in str(
        caught.value
    )


@pytest.mark.parametrize("shape", [(16, 32), (48, 16), (48,), ()])
def test_fused_projection_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"Shape mismatch for h\.0\.attn\.c_attn\.weight"):
        match(config_of(GPT2), stored_gpt2() | {"h.0.attn.c_attn.weight": torch.zeros(shape)})


def test_a_fused_projection_with_rows_that_no_weight_takes_is_refused() -> None:
    """With half of the kv heads, rows of k would be read as v."""
    config = config_of({**LLAMA, "model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": None})
    tensors = {
        source.name: torch.zeros(shape)
        for name, shape in shapes_of(config).items()
        if not (source := architecture_of(config).hf_source(name, config)).folds
    }
    tensors = {f"model.{name}" if name != "lm_head.weight" else name: tensor for name, tensor in tensors.items()}
    for at in range(2):
        tensors[f"model.layers.{at}.mlp.gate_up_proj.weight"] = torch.zeros(48, 16)
        tensors[f"model.layers.{at}.self_attn.qkv_proj.weight"] = torch.zeros(48, 16)
    match(config, tensors)
    half = config_of({**LLAMA, "model_type": "phi3", "num_key_value_heads": 1, "pad_token_id": None})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.qkv_proj\.weight: .* take 512 .* has 768;"):
        match(half, tensors)


def test_a_fold_that_cannot_be_applied_is_a_wrong_shape_too() -> None:
    """llama.cpp's rows of q come in pairs per head; 15 rows do not."""
    gguf = {architecture_of(UNTIED).gguf_source(name, UNTIED).name: shape for name, shape in shapes_of(UNTIED).items()}
    tensors = {name: torch.zeros(shape) for name, shape in gguf.items()}
    assert match(UNTIED, tensors, layout="gguf")["lm_head.weight"] == TensorSource("output.weight")
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight: expected \[16, 16\].* got \[15, 16\]"):
        match(UNTIED, tensors | {"blk.0.attn_q.weight": torch.zeros(15, 16)}, layout="gguf")


@pytest.mark.parametrize(
    ("settings", "scale"), [({}, InverseScale()), ({"linear_class": "autobitlinear"}, ScaleOnly())]
)
def test_a_ternary_weight_and_its_scale_come_from_one_tensor(settings: dict, scale: Fold) -> None:
    config = config_of(LLAMA, quantization_config={"quant_method": "bitnet", **settings})
    stored = {name: tensor for name, tensor in stored_tensors(config).items() if "scale" not in name}
    sources = match(config, stored)
    assert sources["layers.1.self_attn.q_proj.weight"] == TensorSource(Q_PROJ, (WithoutScale(),))
    assert sources["layers.1.self_attn.q_proj.weight_scale"] == TensorSource(Q_PROJ, (scale,))
    assert sources["layers.0.input_layernorm.weight"].folds == ()


def test_ternary_rows_of_a_gguf_file_are_put_in_order_before_the_scale_goes() -> None:
    config = replace(config_of(LLAMA), ternary="divided")
    architecture, names = architecture_of(config), shapes_of(config)
    stored = {
        architecture.gguf_source(name, config).name: shape for name, shape in names.items() if "scale" not in name
    }
    sources = match(config, {name: torch.zeros(shape) for name, shape in stored.items()}, layout="gguf")
    assert sources["layers.0.self_attn.q_proj.weight"].folds == (SplitPairs(2), WithoutScale())
    assert sources["layers.0.self_attn.q_proj.weight_scale"] == TensorSource("blk.0.attn_q.weight", (InverseScale(),))
