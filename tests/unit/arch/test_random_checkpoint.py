"""Seeded random weights: of the true shape, the same for the same seed, whatever else is read."""

import pytest
import torch
from dev_models import BITNET, DEEPSEEK_V2, GEMMA3, GPT_OSS, LLAMA, QWEN2, QWEN3_5, config_of

from graphcore.arch.random_checkpoint import STANDARD_DEVIATION, RandomCheckpoint
from graphcore.arch.registry import architecture_of
from graphcore.arch.weight_map import weight_names
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.nn.spec import ModelSpec
from graphcore.quant import FORMATS, dequantize
from graphcore.quant.format_choice import choose_format

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16}
Q_PROJ = "layers.0.self_attn.q_proj.weight"


def spec_of(raw: dict, **changes: object) -> ModelSpec:
    config = config_of({**raw, **SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})
    return architecture_of(config).spec(config)


def test_it_holds_every_weight_of_the_spec_and_no_head_of_its_own_if_tied() -> None:
    tied, untied = spec_of(LLAMA), spec_of(LLAMA, tie_word_embeddings=False)
    assert RandomCheckpoint(untied, 0).tensors.keys() == set(weight_names(untied))
    assert set(weight_names(tied)) - RandomCheckpoint(tied, 0).tensors.keys() == {"lm_head.weight"}


def test_tensors_have_the_promised_shape_size_and_dtype() -> None:
    checkpoint = RandomCheckpoint(spec_of(LLAMA), 0)
    for name, info in checkpoint.tensors.items():
        tensor = checkpoint.read(name)
        assert tuple(tensor.shape) == info.shape
        assert tensor.nbytes == info.nbytes
        assert (tensor.dtype, info.encoding) == (torch.bfloat16, "bf16")


def test_same_seed_gives_the_same_bytes_and_another_seed_or_name_others() -> None:
    one, again, other = (RandomCheckpoint(spec_of(LLAMA), seed) for seed in (7, 7, 8))
    assert torch.equal(one.read(Q_PROJ), again.read(Q_PROJ))
    assert not torch.equal(one.read(Q_PROJ), other.read(Q_PROJ))
    assert not torch.equal(one.read(Q_PROJ), one.read(Q_PROJ.replace("0", "1")))


def test_a_layer_keeps_its_weights_when_later_layers_are_cut() -> None:
    whole, cut = RandomCheckpoint(spec_of(GEMMA3), 7), RandomCheckpoint(spec_of(GEMMA3, num_hidden_layers=1), 7)
    assert cut.tensors.keys() < whole.tensors.keys()
    assert torch.equal(whole.read(Q_PROJ), cut.read(Q_PROJ))


def test_matrices_vary_norms_are_one_and_biases_zero() -> None:
    checkpoint = RandomCheckpoint(spec_of(QWEN2), 0)
    matrix = checkpoint.read("layers.0.mlp.up_proj.weight").float()
    assert matrix.std().item() == pytest.approx(STANDARD_DEVIATION, rel=0.05)  # 6144 draws
    assert (checkpoint.read("layers.1.input_layernorm.weight") == 1).all()
    assert not checkpoint.read("layers.1.self_attn.q_proj.bias").any()


@pytest.mark.parametrize("format_name", ["", "q4_k"])
def test_delta_rules_forget_and_their_convolutions_stay_dense(format_name: str) -> None:
    """A rate above zero would let a state grow without end."""
    checkpoint = RandomCheckpoint(spec_of(QWEN3_5), 0, format_name)
    rate = checkpoint.read("layers.0.linear_attn.rate")
    assert bool((rate < 0).all())
    assert len(rate.unique()) > 1
    assert checkpoint.tensors["layers.0.linear_attn.conv1d.weight"].encoding == "bf16"


def test_experts_are_packed_mxfp4_with_weights_like_the_others() -> None:
    checkpoint = RandomCheckpoint(spec_of(GPT_OSS, num_local_experts=4), 0)
    packed = {name for name, info in checkpoint.tensors.items() if info.encoding == "mxfp4"}
    parts = ("gate_proj", "up_proj", "down_proj")
    assert packed == {f"layers.{i}.mlp.experts.{part}.weight" for i in range(2) for part in parts}
    for name in packed:
        info, raw = checkpoint.tensors[name], checkpoint.read(name)
        assert raw.dtype == torch.uint8
        assert torch.equal(raw, checkpoint.read(name))
        weights = FORMATS["mxfp4"].dequantize(raw, info.shape)
        assert weights.std().item() == pytest.approx(STANDARD_DEVIATION, rel=0.2)
        assert weights.unique().numel() == 19  # 0 and nine magnitudes: 0.5 to 6, and 1 to 12


def test_a_tensor_that_it_does_not_hold_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(CheckpointError, match=r"q_prj.*did you mean 'layers\.0\.self_attn\.q_proj\.weight'"):
        RandomCheckpoint(spec_of(LLAMA), 0).read("layers.0.self_attn.q_prj.weight")


PACKED = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}


def test_projections_of_ternary_models_are_i2_s_and_nothing_else_is() -> None:
    spec = spec_of(BITNET, **PACKED)
    checkpoint = RandomCheckpoint(spec, 0)
    encodings = {name: info.encoding for name, info in checkpoint.tensors.items()}
    assert {name for name, encoding in encodings.items() if encoding == "i2_s"} == {
        name for name in encodings if name.endswith("_proj.weight")
    }
    assert encodings["embed_tokens.weight"] == "bf16"
    assert not any(name.endswith("weight_scale") for name in encodings)
    assert "i2_s" not in {info.encoding for info in RandomCheckpoint(spec_of(BITNET), 0).tensors.values()}


def test_random_ternary_weights_have_three_values_in_equal_numbers_and_the_usual_deviation() -> None:
    checkpoint = RandomCheckpoint(spec_of(BITNET, **PACKED), 0)
    info, raw = checkpoint.find(Q_PROJ), checkpoint.read(Q_PROJ)
    assert raw.nbytes == info.nbytes
    dense = dequantize(raw, "i2_s", info.shape)
    values, counts = dense.unique(return_counts=True)
    assert values.tolist() == pytest.approx([-values[2].item(), 0.0, values[2].item()])
    assert (counts / dense.numel() - 1 / 3).abs().max() < 0.03  # 4096 draws: four standard deviations
    assert dense.std().item() == pytest.approx(STANDARD_DEVIATION, rel=0.05)
    assert not torch.equal(raw, checkpoint.read(Q_PROJ.replace("0", "1")))
    assert torch.equal(raw, RandomCheckpoint(spec_of(BITNET, **PACKED), 0).read(Q_PROJ))


@pytest.mark.parametrize(("asked", "expected"), [("bf16", "bf16"), ("q8_0", "q8_0")])
def test_matrices_of_heads_are_no_experts(asked: str, expected: str) -> None:
    checkpoint = RandomCheckpoint(architecture_of(config_of(DEEPSEEK_V2)).spec(config_of(DEEPSEEK_V2)), 0, asked)
    heads = {info.encoding for name, info in checkpoint.tensors.items() if "_b_proj" in name}
    assert heads == {expected}


@pytest.mark.parametrize("name", ["bf16", "q4_k", "q8_0", "mxfp4", "i2_s"])
def test_a_named_format_is_what_quant_would_make_and_weights_have_the_usual_deviation(name: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "tie_word_embeddings": False}  # two blocks or more a row
    checkpoint = RandomCheckpoint(spec_of(LLAMA, **sizes), 0, name)
    assert checkpoint.source == f"random:{name}"
    for weight, info in checkpoint.tensors.items():
        wanted = choose_format(weight, info.shape, name, False) if name != "bf16" else None
        assert info.encoding == (wanted or "bf16")
        stored = checkpoint.read(weight)
        assert stored.nbytes == info.nbytes
        if len(info.shape) == 2:
            dense = stored.float() if info.encoding == "bf16" else dequantize(stored, info.encoding, info.shape)
            assert dense.std().item() == pytest.approx(STANDARD_DEVIATION, rel=0.1)
            if info.shape[1] >= 512:
                assert len(dense.unique(dim=0)) == len(dense), f"rows of {weight} are alike"
        else:
            assert (stored == 1).all()


def test_blocks_follow_seed_and_name() -> None:
    one, again, other = (RandomCheckpoint(spec_of(LLAMA), seed, "q8_0") for seed in (7, 7, 8))
    assert torch.equal(one.read(Q_PROJ), again.read(Q_PROJ))
    assert not torch.equal(one.read(Q_PROJ), other.read(Q_PROJ))
    assert not torch.equal(one.read(Q_PROJ), one.read(Q_PROJ.replace("0", "1")))


@pytest.mark.parametrize(("asked", "expected"), [("q8_0", "q8_0"), ("q4_k", "mxfp4"), ("bf16", "mxfp4")])
def test_experts_get_the_format_that_divides_their_rows(asked: str, expected: str) -> None:
    experts = RandomCheckpoint(spec_of(GPT_OSS, num_local_experts=4), 0, asked)
    info = experts.tensors["layers.0.mlp.experts.up_proj.weight"]
    raw = experts.read(info.name)
    assert (info.encoding, raw.dtype, raw.nbytes) == (expected, torch.uint8, FORMATS[expected].nbytes(info.shape))


def test_ternary_projections_stay_ternary() -> None:
    ternary = RandomCheckpoint(spec_of(BITNET, **PACKED), 0, "bf16")
    info = ternary.tensors[Q_PROJ]
    values = dequantize(ternary.read(Q_PROJ), "i2_s", info.shape).unique()
    assert (info.encoding, len(values)) == ("i2_s", 3)


def test_a_format_that_cannot_be_packed_is_refused_with_those_that_can() -> None:
    with pytest.raises(UnsupportedError, match="q4_k"):
        RandomCheckpoint(spec_of(LLAMA), 0, "q9_9")
