"""llama.cpp's names against the table in its own gguf package, and the folds that each family's files need."""

import pytest
from dev_models import (
    BITNET,
    EVERY,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    GPT2,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    config_of,
)
from gguf import MODEL_ARCH, get_tensor_name_map
from support.cases import in_case

from graphcore.arch.architecture import TensorSource
from graphcore.arch.folds import (
    AddOne,
    AsOneRow,
    GroupHeads,
    NegatedExp,
    PickParts,
    PickRows,
    SplitPairs,
    Transpose,
    WithoutChannelAxis,
)
from graphcore.arch.registry import architecture_of
from graphcore.arch.weight_map import weight_names

# The package maps BitNet's sub-norms from the names of 1bitLLM's checkpoint alone.
OLD_BITNET = {"attn_sub_norm": "inner_attn_ln", "mlp.ffn_sub_norm": "mlp.ffn_layernorm"}
# llama.cpp's converter makes these of a delta rule's tensors; the table has the names that they have in between.
DELTA_NAMES = {
    "linear_attn.A_log": "linear_attn.A_log.",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "linear_attn.in_proj_qkvz.weight": "linear_attn.in_proj_{}.weight",
}
# Vectors of Gemma 4's router, which the converter names without the package's table.
APART = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
# Types without lm_head in the package's table; llama.cpp reads it of some under the usual name.
WITHOUT_HEAD = ("bitnet", "gemma", "gemma2", "lfm2_moe")
# Experts of LFM2, which the converter merges under the names of their projections.
LFM2_EXPERTS = {
    f"mlp.experts.{leaf}": f"feed_forward.experts.{stored}"
    for leaf, stored in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
}
ARCHS = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "phi3": MODEL_ARCH.PHI3,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "stablelm": MODEL_ARCH.STABLELM,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "gemma4_unified_text": MODEL_ARCH.GEMMA4,
    "gpt2": MODEL_ARCH.GPT2,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": MODEL_ARCH.DEEPSEEK2,
    "glm4": MODEL_ARCH.GLM4,
    "glm": MODEL_ARCH.CHATGLM,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "exaone4": MODEL_ARCH.EXAONE4,
    "bitnet": MODEL_ARCH.BITNET,
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "mixtral": MODEL_ARCH.LLAMA,
    "granite": MODEL_ARCH.GRANITE,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "smollm3": MODEL_ARCH.SMOLLM3,
}


def sources(raw: dict, layout: str) -> dict[str, TensorSource]:
    config = config_of(raw, num_hidden_layers=2, n_layer=2)
    architecture = architecture_of(config)
    source = architecture.gguf_source if layout == "gguf" else architecture.hf_source
    return {name: source(name, config) for name in weight_names(architecture.spec(config))}


def folds(raw: dict, layout: str, name: str) -> tuple[object, ...]:
    return sources(raw, layout)[name].folds


def test_every_architecture_is_checked_here() -> None:
    assert ARCHS.keys() == EVERY.keys()


def test_names_are_those_of_the_gguf_package() -> None:
    for model_type in ARCHS:
        with in_case(model_type):
            table = get_tensor_name_map(ARCHS[model_type], 2)
            stored = sources(EVERY[model_type], "hf")
            for name, source in sources(EVERY[model_type], "gguf").items():
                hf_name = stored[name].name if model_type == "gpt2" else f"model.{stored[name].name}"
                if name == "lm_head.weight":
                    hf_name = name
                if ".router." in hf_name and hf_name.endswith("scale"):
                    before = "blk." + hf_name.removeprefix("model.layers.").partition(".")[0]
                    assert source.name == f"{before}.{APART[hf_name.partition('.router.')[2]]}"
                    continue
                if model_type.startswith("gemma4"):
                    hf_name = hf_name if hf_name.endswith(".weight") else f"{hf_name}.weight"
                elif model_type == "lfm2_moe":
                    hf_name = hf_name.replace("expert_bias", "expert_bias.bias")
                    for leaf, stored_leaf in LFM2_EXPERTS.items():
                        hf_name = f"model.{name.replace(leaf, stored_leaf)}" if leaf in name else hf_name
                elif "mlp.experts." in name:  # the package's table has them apart, as the converter writes them
                    hf_name = f"model.{name}"
                if name.endswith("sinks"):
                    hf_name += ".weight"
                if "_b_proj." in name and "kv_b_proj" in hf_name:  # the converter divides it before it asks for names
                    hf_name = f"model.{name}"
                hf_name = hf_name.replace("e_score_correction_bias", "e_score_correction.bias")
                for stored_leaf, leaf in DELTA_NAMES.items():
                    part = "z" if "in_proj_z" in name else "qkv"
                    hf_name = hf_name.replace(stored_leaf, leaf.format(part))
                module, _, parameter = hf_name.rpartition(".")
                for current, old in OLD_BITNET.items():
                    module = module.replace(current, old)
                if model_type in WITHOUT_HEAD and name == "lm_head.weight":
                    continue
                assert f"{table.get_name(module)}.{parameter}".removesuffix(".") == source.name


@pytest.mark.parametrize("raw", [LLAMA, MISTRAL], ids=["llama", "mistral"])
def test_llama_s_q_and_k_rows_are_put_back_in_order_per_head(raw: dict) -> None:
    heads = {name: source.folds for name, source in sources(raw, "gguf").items() if source.folds}
    assert heads == {
        f"layers.{i}.self_attn.{part}_proj.weight": (SplitPairs(count),)
        for i in range(2)
        for part, count in (("q", 32), ("k", 8))
    }


def test_biases_of_q_and_k_are_put_back_in_order_too() -> None:
    assert folds({**LLAMA, "attention_bias": True}, "gguf", "layers.0.self_attn.k_proj.bias") == (SplitPairs(8),)


@pytest.mark.parametrize("layout", ["hf", "gguf"])
@pytest.mark.parametrize("raw", [GLM, GLM4], ids=lambda raw: raw["model_type"])
def test_rows_of_q_and_k_of_glm_are_put_back_in_order_where_they_rotate(raw: dict, layout: str) -> None:
    assert folds(raw, layout, "layers.1.self_attn.q_proj.bias") == (SplitPairs(32, 64),)
    assert folds(raw, layout, "layers.1.self_attn.k_proj.weight") == (SplitPairs(2, 64),)
    assert folds({**raw, "partial_rotary_factor": 1.0}, layout, "layers.1.self_attn.k_proj.weight") == (SplitPairs(2),)
    assert folds(raw, layout, "layers.1.self_attn.v_proj.weight") == ()
    assert folds(raw, layout, "layers.0.mlp.up_proj.weight") == (PickRows(13_696, 27_392),)


@pytest.mark.parametrize(
    "raw", [QWEN2, QWEN3, QWEN3_MOE, GEMMA, GEMMA2, GEMMA3, BITNET], ids=lambda raw: raw["model_type"]
)
def test_other_rotary_files_are_read_as_they_are(raw: dict) -> None:
    assert not any(source.folds for source in sources(raw, "gguf").values())


@pytest.mark.parametrize(("raw", "norms"), [(GEMMA, 2), (GEMMA2, 4), (GEMMA3, 6)], ids=["gemma", "gemma2", "gemma3"])
def test_gemma_s_safetensors_norms_get_their_one_and_nothing_else_does(raw: dict, norms: int) -> None:
    folded = {name for name, source in sources(raw, "hf").items() if source.folds == (AddOne(),)}
    assert folded == {name for name in sources(raw, "hf") if "norm" in name}
    assert len(folded) == 2 * norms + 1


@pytest.mark.parametrize(
    "raw", [LLAMA, MISTRAL, QWEN2, QWEN3, BITNET], ids=["llama", "mistral", "qwen2", "qwen3", "bitnet"]
)
def test_rotary_safetensors_are_read_as_they_are(raw: dict) -> None:
    assert all(source == TensorSource(name) for name, source in sources(raw, "hf").items())


def test_phi3_s_fused_projections_are_cut_in_both_layouts() -> None:
    rows = {
        "self_attn.q_proj": ("self_attn.qkv_proj", "attn_qkv", 0, 3072),
        "self_attn.k_proj": ("self_attn.qkv_proj", "attn_qkv", 3072, 4096),
        "self_attn.v_proj": ("self_attn.qkv_proj", "attn_qkv", 4096, 5120),
        "mlp.gate_proj": ("mlp.gate_up_proj", "ffn_up", 0, 8192),
        "mlp.up_proj": ("mlp.gate_up_proj", "ffn_up", 8192, 16_384),
    }
    for module, (stored, gguf_leaf, begin, end) in rows.items():
        name, fold = f"layers.1.{module}.weight", (PickRows(begin, end),)
        assert candidates("hf", name, PHI3) == {f"layers.1.{stored}.weight": fold}
        assert candidates("gguf", name, PHI3)[f"blk.1.{gguf_leaf}.weight"] == fold
    alone = candidates("gguf", "layers.0.self_attn.k_proj.weight", PHI3)
    assert alone["blk.0.attn_k.weight"] == ()


def test_gpt2_s_fused_projection_is_cut_in_three() -> None:
    for part, start in (("q", 0), ("k", 768), ("v", 1536)):
        rows = PickRows(start, start + 768)
        assert folds(GPT2, "hf", f"layers.1.self_attn.{part}_proj.weight") == (Transpose(), rows)
        assert folds(GPT2, "hf", f"layers.1.self_attn.{part}_proj.bias") == (rows,)
        assert folds(GPT2, "gguf", f"layers.1.self_attn.{part}_proj.weight") == (rows,)
    assert sources(GPT2, "hf")["layers.1.self_attn.v_proj.bias"].name == "h.1.attn.c_attn.bias"


def test_gpt2_s_conv1d_weights_are_transposed_and_its_embeddings_are_not() -> None:
    transposed = {name for name, source in sources(GPT2, "hf").items() if Transpose() in source.folds}
    assert {name.split(".", 2)[2] for name in transposed if name.startswith("layers.0")} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }
    assert all(name.startswith("layers.") for name in transposed)


def candidates(layout: str, name: str, raw: dict = GPT_OSS) -> dict[str, tuple[object, ...]]:
    """Return every form of a tensor of a mixture, name to folds."""
    config = config_of(raw)
    architecture = architecture_of(config)
    find = architecture.gguf_sources if layout == "gguf" else architecture.hf_sources
    return {source.name: source.folds for source in find(name, config)}


def test_gpt_oss_experts_are_found_dense_by_input_row_or_packed_by_output_row() -> None:
    for start, part in enumerate(("gate", "up")):
        rows = PickRows(start, 5760, step=2, axis=-2)
        assert candidates("hf", f"layers.3.mlp.experts.{part}_proj.weight") == {
            "layers.3.mlp.experts.gate_up_proj": (Transpose(), rows),
            "layers.3.mlp.experts.gate_up_proj_blocks": (rows,),
        }
        assert candidates("hf", f"layers.3.mlp.experts.{part}_proj.bias") == {
            "layers.3.mlp.experts.gate_up_proj_bias": (PickRows(start, 5760, step=2, axis=-1),)
        }
    assert candidates("hf", "layers.0.mlp.experts.down_proj.weight") == {
        "layers.0.mlp.experts.down_proj": (Transpose(),),
        "layers.0.mlp.experts.down_proj_blocks": (),
    }
    assert candidates("hf", "layers.0.mlp.experts.down_proj.bias") == {"layers.0.mlp.experts.down_proj_bias": ()}
    assert candidates("hf", "layers.0.mlp.router.weight") == {"layers.0.mlp.router.weight": ()}


def test_gpt_oss_gguf_tensors_are_found_apart_or_fused() -> None:
    assert candidates("gguf", "layers.1.mlp.experts.up_proj.weight") == {
        "blk.1.ffn_up_exps.weight": (),
        "blk.1.ffn_gate_up_exps.weight": (PickRows(2880, 5760, axis=-2),),
    }
    assert candidates("gguf", "layers.1.mlp.experts.gate_proj.bias") == {
        "blk.1.ffn_gate_exps.bias": (),
        "blk.1.ffn_gate_up_exps.bias": (PickRows(0, 2880, axis=-1),),
    }
    for part, start, stop in (("q", 0, 4096), ("k", 4096, 4608), ("v", 4608, 5120)):
        for leaf in ("weight", "bias"):
            assert candidates("gguf", f"layers.1.self_attn.{part}_proj.{leaf}") == {
                f"blk.1.attn_{part}.{leaf}": (),
                f"blk.1.attn_qkv.{leaf}": (PickRows(start, stop),),
            }
    assert candidates("gguf", "layers.1.self_attn.sinks") == {"blk.1.attn_sinks.weight": ()}
    assert candidates("gguf", "layers.1.mlp.experts.down_proj.weight") == {"blk.1.ffn_down_exps.weight": ()}


def test_experts_of_qwen_are_found_one_by_one_or_fused_gate_first() -> None:
    for part, start in (("gate", 0), ("up", 768)):
        rows = PickRows(start, start + 768, axis=-2)
        assert candidates("hf", f"layers.3.mlp.experts.{part}_proj.weight", QWEN3_MOE) == {
            f"layers.3.mlp.experts.{part}_proj.weight": (),
            "layers.3.mlp.experts.gate_up_proj": (rows,),
        }
        assert candidates("gguf", f"layers.3.mlp.experts.{part}_proj.weight", QWEN3_MOE) == {
            f"blk.3.ffn_{part}_exps.weight": (),
            "blk.3.ffn_gate_up_exps.weight": (rows,),
        }
    assert candidates("hf", "layers.0.mlp.experts.down_proj.weight", QWEN3_MOE) == {
        "layers.0.mlp.experts.down_proj.weight": (),
        "layers.0.mlp.experts.down_proj": (),
    }
    assert candidates("hf", "layers.0.mlp.router.weight", QWEN3_MOE) == {"layers.0.mlp.gate.weight": ()}
    assert candidates("hf", "layers.0.self_attn.q_norm.weight", QWEN3_MOE) == {"layers.0.self_attn.q_norm.weight": ()}


@pytest.mark.parametrize("raw", [QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE], ids=lambda raw: raw["model_type"])
def test_a_head_s_query_and_gate_lie_side_by_side_in_both_layouts(raw: dict) -> None:
    for name, begin in (("q_proj", 0), ("gate_proj", 256)):
        pick = (PickParts(16, ((begin, begin + 256),)),)
        assert candidates("hf", f"layers.3.self_attn.{name}.weight", raw) == {"layers.3.self_attn.q_proj.weight": pick}
        assert candidates("gguf", f"layers.3.self_attn.{name}.weight", raw) == {"blk.3.attn_q.weight": pick}


@pytest.mark.parametrize("raw", [QWEN3_NEXT, QWEN3_5], ids=lambda raw: raw["model_type"])
def test_norms_of_a_delta_rule_s_answers_are_stored_as_they_are_and_all_others_without_one(raw: dict) -> None:
    ones = {
        name
        for name, source in sources({**raw, "full_attention_interval": 2}, "hf").items()
        if source.folds == (AddOne(),)
    }
    assert ones == {
        "norm.weight",
        "layers.1.self_attn.q_norm.weight",
        "layers.1.self_attn.k_norm.weight",
        *(
            f"layers.{layer}.{norm}.weight"
            for layer in (0, 1)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ),
    }
    assert folds(raw, "hf", "layers.0.linear_attn.norm.weight") == ()
    assert folds(raw, "gguf", "norm.weight") == ()


def test_inputs_of_qwen3_next_are_grouped_by_key_head() -> None:
    qkv = PickParts(16, ((0, 128), (128, 256), (256, 512)))
    z = PickParts(16, ((512, 768),))
    for part, fold, own in (("qkv", qkv, "attn_qkv"), ("z", z, "attn_gate")):
        name = f"layers.0.linear_attn.in_proj_{part}.weight"
        assert candidates("hf", name, QWEN3_NEXT) == {"layers.0.linear_attn.in_proj_qkvz.weight": (fold,)}
        assert candidates("gguf", name, QWEN3_NEXT) == {f"blk.0.{own}.weight": (), "blk.0.ssm_in.weight": (fold,)}
    for part, parts in (("b", ((0, 2),)), ("a", ((2, 4),))):
        name, fold = f"layers.0.linear_attn.in_proj_{part}.weight", PickParts(16, parts)
        assert candidates("hf", name, QWEN3_NEXT) == {"layers.0.linear_attn.in_proj_ba.weight": (fold,)}
        assert candidates("gguf", name, QWEN3_NEXT) == {"blk.0.ssm_ba.weight": (fold,)}


def test_value_heads_of_qwen3_5_are_tiled_in_gguf_files_alone() -> None:
    expected = {
        "in_proj_qkv.weight": ((), (GroupHeads(16, 2, 128, first=4096),)),
        "in_proj_z.weight": ((), (GroupHeads(16, 2, 128),)),
        "in_proj_a.weight": ((), (GroupHeads(16, 2, 1),)),
        "in_proj_b.weight": ((), (GroupHeads(16, 2, 1),)),
        "conv1d.weight": ((WithoutChannelAxis(),), (GroupHeads(16, 2, 128, first=4096),)),
        "rate": ((NegatedExp(),), (GroupHeads(16, 2, 1),)),
        "dt_bias": ((), (GroupHeads(16, 2, 1),)),
        "norm.weight": ((), ()),
        "out_proj.weight": ((), (GroupHeads(16, 2, 128, of_columns=True),)),
    }
    for leaf, (of_hf, of_gguf) in expected.items():
        name = f"layers.0.linear_attn.{leaf}"
        assert folds(QWEN3_5, "hf", name) == of_hf, leaf
        assert folds(QWEN3_5, "gguf", name) == of_gguf, leaf
        assert folds({**QWEN3_5, "linear_num_value_heads": 16}, "gguf", name) == (), leaf
        assert not any(isinstance(fold, GroupHeads) for fold in folds(QWEN3_NEXT, "gguf", name)), leaf


def test_the_gate_of_a_shared_expert_is_a_vector_in_gguf_files() -> None:
    name = "layers.0.mlp.shared_expert_gate.weight"
    assert folds(QWEN3_5_MOE, "gguf", name) == (AsOneRow(),)
    assert folds(QWEN3_5_MOE, "hf", name) == ()
