"""config.json to ModelConfig against transformers' own configuration classes."""

import copy
import json
from pathlib import Path

import pytest
import torch
from dev_models import EVERY, LLAMA, config_of
from support.cases import in_case
from support.hub_configs import FAMILIES, parse

from graphcore.arch.config.other_names import HuggingFaceNames
from graphcore.arch.config_from_json import ModelConfig, load_model_config, parse_model_config
from graphcore.arch.registry import ARCHITECTURES

STATED = {"glm4_moe": {"head_dim": 128}}  # by itself the class rounds 4096 / 96 heads down, and rotates 21 features
STATED |= {"deepseek_v2": {"num_experts_per_tok": 6}}  # None by itself
WITHOUT_TYPES = ("mistral", "phi3", "starcoder2")  # their classes have no layer_types, and every layer slides
TINY = Path(__file__).parents[2] / "golden" / "tiny"


def known_to_transformers(raw: dict) -> dict:
    """Return a copy whose model_type transformers has; Kimi K2's own code is DeepSeek V3's."""
    found = copy.deepcopy(raw)
    return {**found, "model_type": "deepseek_v3"} if found["model_type"] == "kimi_k2" else found


def reference(raw: dict) -> dict:
    """Return the dictionary of transformers' configuration."""
    from transformers import AutoConfig, logging
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    logging.set_verbosity_error()
    config = AutoConfig.for_model(**known_to_transformers(raw)).get_text_config()
    theirs = config.to_dict()
    if config.model_type == "gpt_oss":  # the defaults are the experts' alone in transformers 5.17, the config's in 5.23
        with torch.device("meta"):
            experts = GptOssExperts(config)
        theirs = {"swiglu_limit": experts.limit, "swiglu_alpha": experts.alpha, **theirs}
    return theirs


def test_class_defaults_are_those_of_transformers():
    for model_type in sorted(ARCHITECTURES):
        with in_case(model_type):
            stated = STATED.get(model_type, {})
            theirs = reference({"model_type": model_type, **stated})
            defaults = ARCHITECTURES[model_type].defaults
            raw = stated | {
                alias: theirs[alias]
                for name in defaults.required
                for alias in (*defaults.own_names.get(name, ()), name)
                if alias in theirs
            }
            assert_agrees(parse_model_config({"model_type": model_type, **raw}, "config.json", None), theirs)


def test_hub_configs_agree_with_transformers():
    for name in sorted(FAMILIES):
        with in_case(name):
            assert_agrees(parse(FAMILIES[name]), reference(FAMILIES[name]), skip=("eos", "tie"))


def test_what_transformers_5_saves_reads_the_same():
    for name in sorted(FAMILIES):
        with in_case(name):
            from transformers import AutoConfig

            saved = json.loads(
                AutoConfig.for_model(**known_to_transformers(FAMILIES[name])).to_json_string(use_diff=True)
            )
            ours, again = parse(FAMILIES[name]), parse_model_config(saved, "saved", None)
            assert again.rope == ours.rope
            assert again.dtype == ours.dtype
            full = ("full_attention",)
            mine, theirs = ours.attention.layer_types, again.attention.layer_types
            assert (theirs or full) == (mine or theirs or full)
            assert again.attention.head_dim == ours.attention.head_dim
            assert again.attention.sliding_window == ours.attention.sliding_window


def _mlp_width(theirs: dict) -> int:
    """Return the width of LFM2's MLP as its class computes it."""
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    with torch.device("meta"):
        return Lfm2MLP(Lfm2Config(**theirs)).w1.out_features


def assert_agrees(ours: ModelConfig, theirs: dict, skip: tuple[str, ...] = ()) -> None:
    """Compare with a transformers config's own dictionary, under its own names."""
    flat = {**vars(ours), **vars(ours.attention)}
    alias = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    for name in (*alias, "vocab_size"):
        assert flat[name] == theirs[name if name in theirs else alias[name]], name
    theirs = {**theirs, "intermediate_size": _mlp_width(theirs)} if theirs["model_type"] == "lfm2" else theirs
    for name in ("num_key_value_heads", "head_dim", "intermediate_size", "query_pre_attn_scalar", "sliding_window"):
        if name in theirs and theirs[name] is not None:
            assert flat[name] == theirs[name], name
    names = ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps")
    assert ours.norm_eps == next(theirs[name] for name in names if theirs.get(name) is not None)
    activation = theirs.get("hidden_activation") or theirs.get("hidden_act") or theirs.get("activation_function")
    assert ours.hidden_act == (activation or "silu")  # LFM2's classes have no setting
    rope = theirs.get("rope_parameters") or {}
    if theirs["model_type"] == "gpt2":
        assert ours.rope is None
    else:
        assert ours.rope.theta == rope.get("full_attention", rope).get("rope_theta", 10_000.0)
        assert ours.rope.local_theta == rope.get("sliding_attention", {}).get("rope_theta")
    expected_layers = theirs.get("layer_types") or ours.num_hidden_layers * ["full_attention"]
    if theirs["model_type"] not in WITHOUT_TYPES:
        assert list(ours.attention.layer_types or ours.num_hidden_layers * ["full_attention"]) == expected_layers
    if "tie" not in skip:
        assert ours.tie_word_embeddings == theirs["tie_word_embeddings"]
    if "num_experts" in theirs and "num_local_experts" not in theirs:
        theirs = {**theirs, "num_local_experts": theirs["num_experts"]}
    if "n_routed_experts" in theirs:
        shared = theirs["n_shared_experts"] * theirs["moe_intermediate_size"]
        own = {"num_local_experts": theirs["n_routed_experts"], "shared_expert_intermediate_size": shared}
        theirs = {**theirs, **own}
        names = ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
        first, *then = (theirs[name] or 1 for name in names[:2])
        scores = ("softmax", 1) if theirs["model_type"] == "deepseek_v2" else ("sigmoid", 2)
        chosen = (first, *then, theirs[names[2]], 1e-20, theirs[names[3]])
        assert ours.experts.routing == (scores[0], *chosen, scores[1])
        kinds = theirs.get("mlp_layer_types") or ["dense"] * theirs["first_k_dense_replace"]
        assert ours.experts.mlp_only_layers == tuple(range(kinds.count("dense")))
    widths = ("moe_intermediate_size", "shared_expert_intermediate_size")
    for name in ("num_local_experts", "num_experts_per_tok", "swiglu_limit", "swiglu_alpha", *widths):
        their_name = "top_k_experts" if name == "num_experts_per_tok" and "top_k_experts" in theirs else name
        assert vars(ours.experts or object).get(name) == theirs.get(their_name), name
    sizes = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    for name in (f"linear_{size}" for size in sizes):
        assert vars(ours.delta or object).get(name) == theirs.get(name), name
    if "norm_topk_prob" in theirs:
        assert ours.experts.norm_topk_prob == theirs["norm_topk_prob"]
    if "kv_lora_rank" in theirs:
        widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
        assert [vars(ours.own)[name] for name in widths] == [theirs[name] or 0 for name in widths]
        assert ours.num_predicting_layers == theirs.get("num_nextn_predict_layers", 0)
    if theirs["model_type"] == "glm4_moe":
        assert ours.attention.qkv_bias == theirs["attention_bias"]
        assert not ours.attention.output_bias
        assert ours.rope.width == int(ours.attention.head_dim * rope["partial_rotary_factor"])
    if theirs["model_type"] in ("llama", "mistral", "qwen2", "qwen3", "gpt_oss", "qwen3_moe"):
        assert ours.attention.output_bias == theirs.get("attention_bias", False)
    if "eos" not in skip:
        ends = theirs["eos_token_id"]
        assert ours.eos_token_ids == (() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,))
        assert ours.bos_token_id == theirs["bos_token_id"]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt2", "gptoss"])
def test_configs_that_transformers_5_saved_are_read(name):
    config = load_model_config(TINY / name)
    raw = json.loads((TINY / name / "config.json").read_text())
    assert_agrees(config, raw)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mistral", "qwen3_moe", "gpt_oss"])
def test_settings_are_read_under_the_names_of_transformers(name):
    """Every name of the table that transformers' own config of the model has gives the same value."""
    from transformers import AutoConfig

    ours, theirs = config_of(EVERY[name]), AutoConfig.for_model(**copy.deepcopy(EVERY[name]))
    compared = set()
    for alias in (one for one in vars(HuggingFaceNames) if not one.startswith(("_", "rope_", "torch_"))):
        stated, found = getattr(theirs, alias, None), getattr(ours, alias)
        if stated is not None and found is not None:
            assert found == stated, alias
            compared.add(alias)
    assert compared >= {"num_key_value_heads", "num_attention_heads", "head_dim", "rms_norm_eps"}
    assert ours.rope_theta == rope_of(theirs.rope_parameters)["rope_theta"]
    assert rope_of(ours.rope_parameters).items() >= rope_of(theirs.rope_parameters).items()


def rope_of(parameters: dict) -> dict:
    return parameters.get("full_attention", parameters)


def test_the_names_of_the_first_requirements_are_read_and_not_written():
    """The dataclass of phase 1a: flat names, computed_head_dim among them."""
    config = config_of(EVERY["gemma3_text"])
    flat = {
        "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "computed_head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6, "tie_word_embeddings": True,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in flat} == flat
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17, 23]
    assert config_of(EVERY["llama"]).computed_head_dim == LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    for name in ("rms_norm_eps", "computed_head_dim", "hidden_size"):
        with pytest.raises(AttributeError):
            setattr(config, name, 1)
    with pytest.raises(AttributeError):
        config.rms_norm_epsilon  # noqa: B018
