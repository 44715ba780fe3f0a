"""Every setting of transformers' own config classes is read, refused by name, or known to change no logits."""

from dataclasses import fields

from dev_models import EVERY
from support.cases import in_case
from transformers import AutoConfig

from graphcore.arch.config_from_json import parse_model_config
from graphcore.errors import CheckpointError, UnsupportedError

OF_TRAINING = {"initializer_range", "attention_dropout", "output_router_logits", "router_aux_loss_coef"}
OF_TRAINING |= {"router_jitter_noise"}
OF_RUNNING = {"use_cache", "pad_token_id", "pretraining_tp"}
INERT = OF_TRAINING | OF_RUNNING
# computed from qk_rope_head_dim; and V2-Lite has one group of experts
INERT_IN = {"deepseek_v2": {"head_dim", "n_group", "topk_group", "topk_method"}}
CHANGES: dict[str, object] = {
    "hidden_act": "gelu",
    "hidden_activation": "silu",
    "layer_types": ["full_attention"],
    "mlp_only_layers": [0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0},
    "bos_token_id": 7,
    "pad_token_id": 7,
    "sliding_window": 96,
    "sliding_window_pattern": "LG",
    "eos_token_id": 7,
    "use_bidirectional_attention": "all",
    "top_k_experts": 3,
    "num_experts": 5,
    "n_routed_experts": 192,
    "mlp_layer_types": ["sparse"] * 47,
    "topk_method": "group_limited_greedy",
    "moe_intermediate_size": 96,
    "final_logit_softcapping": 5.0,
    "head_dim": 96,
    "no_rope_layers": 36 * [1],
}
BESIDE = {"use_sliding_window": {"sliding_window": 48}, "sliding_window": {"use_sliding_window": True}}
"""Settings without which another one says nothing."""

ALIKE = ("qwen3_", "gemma4", "glm", "olmo", "exaone", "ministral3", "mixtral", "granite", "smollm3", "deepseek")
TYPES = [name for name in EVERY if name.startswith(ALIKE)]


def changed(name: str, value: object) -> object:
    """Return another value of a setting."""
    if name in CHANGES:
        return CHANGES[name]
    match value:
        case bool():
            return not value
        case int():
            return value + 2
        case float():
            return 2 * value + 1
    raise AssertionError(f"{name}: no other value than {value!r} is known here")


def own_fields(model_type: str) -> list[str]:
    """Return the settings that transformers' class declares, without those that all models have."""
    from transformers import PreTrainedConfig

    common = {field.name for field in fields(PreTrainedConfig)}
    return [field.name for field in fields(type(AutoConfig.for_model(model_type))) if field.name not in common]


def test_a_setting_is_read_refused_or_inert() -> None:
    for model_type, name in [(one, name) for one in TYPES for name in own_fields(one)]:
        with in_case(model_type, name):
            raw = {**EVERY[model_type], **(BESIDE.get(name, {}) if model_type in ("qwen3_moe", "smollm3") else {})}
            value = changed(
                name, raw[name] if raw.get(name) is not None else getattr(AutoConfig.for_model(model_type), name)
            )
            base = parse_model_config(raw, "config.json")
            try:
                is_read = parse_model_config({**raw, name: value}, "config.json") != base
            except (UnsupportedError, CheckpointError) as error:
                assert name in str(error)  # noqa: PT017 - refusing is one of the right answers
                is_read = True
            assert is_read != (name in INERT | INERT_IN.get(model_type, set()))
