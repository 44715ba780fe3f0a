"""The settings of a `ModelConfig` under the flat names of Hugging Face's configs, read-only.

`ModelConfig` groups settings (attention, rope, experts); code written for transformers' configs reads them flat. This
table is the only place of those names; settings whose name is the same in both are fields of `ModelConfig`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from graphcore.arch.config.model_config import ModelConfig, RopeParameters

T = TypeVar("T")


class OtherName(Generic[T]):
    """A read-only attribute of `ModelConfig`, computed from its fields.

    Args:
        read: function from the config to the value.
    """

    def __init__(self, read: "Callable[[ModelConfig], T]") -> None:
        self.read = read

    def __get__(self, config: "ModelConfig", owner: type) -> T:
        return self.read(config)


class HuggingFaceNames:
    """The names of settings in Hugging Face's config.json that `ModelConfig` groups or calls otherwise."""

    num_attention_heads = OtherName(lambda config: config.attention.num_attention_heads)
    num_key_value_heads = OtherName(lambda config: config.attention.num_key_value_heads)
    head_dim = OtherName(lambda config: config.attention.head_dim)
    computed_head_dim = OtherName(lambda config: config.attention.head_dim)
    attention_bias = OtherName(lambda config: config.attention.output_bias)
    query_pre_attn_scalar = OtherName(lambda config: config.attention.query_pre_attn_scalar)
    sliding_window = OtherName(lambda config: config.attention.sliding_window)
    sliding_window_pattern = OtherName(lambda config: config.attention.sliding_window_pattern)
    layer_types = OtherName(lambda config: list(config.attention.layer_types) if config.attention.layer_types else None)
    rms_norm_eps = OtherName(lambda config: config.norm_eps)
    layer_norm_epsilon = OtherName(lambda config: config.norm_eps)
    hidden_activation = OtherName(lambda config: config.hidden_act)
    eos_token_id = OtherName(lambda config: _one_or_all(config.eos_token_ids))
    torch_dtype = OtherName(lambda config: config.dtype)
    rope_theta = OtherName(lambda config: config.rope.theta if config.rope else None)
    rope_parameters = OtherName(lambda config: _rope_settings(config.rope) if config.rope else None)
    rope_scaling = OtherName(
        lambda config: _scaling_settings(config.rope) if config.rope and config.rope.scaling else None
    )
    rope_local_base_freq = OtherName(lambda config: config.rope.local_theta if config.rope else None)
    num_experts = OtherName(lambda config: config.experts.num_local_experts if config.experts else None)
    num_local_experts = OtherName(lambda config: config.experts.num_local_experts if config.experts else None)
    num_experts_per_tok = OtherName(lambda config: config.experts.num_experts_per_tok if config.experts else None)
    moe_intermediate_size = OtherName(lambda config: config.experts.moe_intermediate_size if config.experts else None)


def _rope_settings(rope: "RopeParameters") -> dict[str, object]:
    """Return the rotary settings in the form of transformers' config classes."""
    full: dict[str, object] = {**_scaling_settings(rope), "rope_theta": rope.theta}
    if rope.local_theta is None:
        return full
    return {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": rope.local_theta},
    }


def _scaling_settings(rope: "RopeParameters") -> dict[str, object]:
    """Return the settings of the scaling, with longrope's lists."""
    lists = {"short_factor": rope.short_factors, "long_factor": rope.long_factors}
    found = {name: list(factors) for name, factors in lists.items() if factors is not None}
    return {**(rope.scaling or {"rope_type": "default"}), **found}


def _one_or_all(ids: tuple[int, ...]) -> int | list[int] | None:
    """Return the only id, or a list of several, as config.json has them; None for none."""
    return list(ids) if len(ids) > 1 else next(iter(ids), None)
