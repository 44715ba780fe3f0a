"""Ministral 3 (3B, 8B, 14B) and Devstral 2: Llama's block with YaRN, and queries that are scaled by their position.

    query at position p    rotated, then multiplied by 1 + beta * log(1 + floor(p / original context))

    config.json    rope_parameters: llama_4_scaling_beta, original_max_position_embeddings
    GGUF           attention.temperature_scale, rope.scaling.original_context_length

GGUF files of general.architecture "mistral3" are read as this type. Without a temperature_scale no query is scaled:
llama.cpp's converter also writes text models of Mistral Small 3.1 and later to such files. Older files of Mistral
models are of the architecture "llama".

Source: transformers 5.24, modeling_ministral3; llama.cpp, src/models/mistral3.cpp and conversion/mistral3.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from graphcore.arch.architecture import Shapes
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys, as_float32
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config.rope_parameters import ORIGINAL, full_attention_rope
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.families.llama import MISTRAL_PREFIXES, MISTRAL_UNUSED, Llama
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.errors import CheckpointError
from graphcore.nn.rope_spec import PositionScale
from graphcore.nn.spec import AttentionSpec, BlockSpec, ModelSpec

BETA = "llama_4_scaling_beta"
TEMPERATURE_SCALE = "attention.temperature_scale"
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


@dataclass(frozen=True)
class MinistralSettings:
    """The settings that only Ministral 3 has.

    Attributes:
        scale: factor of queries by their position; None for none.
    """

    scale: PositionScale | None

    def cut(self, num_layers: int) -> "MinistralSettings":
        """Return the same settings, which concern all layers."""
        return self


@dataclass(frozen=True)
class Ministral(Llama):
    """The architecture of Ministral 3: Llama's, with a factor of queries that grows with their position."""

    hf_prefixes: tuple[str, ...] = MISTRAL_PREFIXES
    unused: Mapping[str, str] = field(default_factory=lambda: MISTRAL_UNUSED)

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: that of Llama, with scaled queries."""
        model, scale = super().spec(config), _own(config).scale
        return replace(model, blocks=tuple(_with_scale(block, scale) for block in model.blocks))

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with the scale of queries, which is among the rotary settings."""
        rope = full_attention_rope(fields, self.defaults)
        beta, period = rope.number(BETA), rope.whole(ORIGINAL)
        if beta and period is None:
            raise CheckpointError(f"{rope.source}: {BETA} needs {ORIGINAL}; add what is missing")
        return replace(config, own=_settings(beta, period))

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with the scale of queries; its period is YaRN's original context, as in llama.cpp."""
        beta = keys.fields.number(keys.name(TEMPERATURE_SCALE))
        period = keys.size("rope.scaling.original_context_length") or config.max_position_embeddings
        return replace(config, own=_settings(beta, period))

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the keys of the window, the scale of queries, and YaRN."""
        found, scale = dict(super().gguf_fields(config)), _own(config).scale
        scaling = None if config.rope is None else config.rope.scaling
        if scale is not None:
            found |= {TEMPERATURE_SCALE: scale.beta, "rope.scaling.original_context_length": scale.period}
        if scaling is not None and scaling["rope_type"] == "yarn":
            found |= {f"rope.scaling.yarn_{key}": float(scaling[key]) for key in ("beta_fast", "beta_slow")}
            if scaling["attention_factor"] == 1.0:  # cosines and sines are not scaled
                found[LOG_MULTIPLIER] = 1.0
        return found

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the rotary settings with the scale of queries, which transformers always reads; 0 is none."""
        scale, rope = _own(config).scale, config.rope_parameters or {}
        beta, period = (0.0, config.max_position_embeddings) if scale is None else (scale.beta, scale.period)
        return {"rope_parameters": {ORIGINAL: period, **rope, BETA: beta}}

    def as_gguf(self, config: ModelConfig) -> ModelConfig:
        """Return the config with llama_4_scaling_beta rounded to float32."""
        scale = _own(config).scale
        return config if scale is None else replace(config, own=_settings(as_float32(scale.beta), scale.period))


def _settings(beta: float | None, period: int | None) -> MinistralSettings:
    return MinistralSettings(PositionScale(beta, period) if beta and period else None)


def _own(config: ModelConfig) -> MinistralSettings:
    assert isinstance(config.own, MinistralSettings), "the config readers give every Ministral 3 its own settings"
    return config.own


def _with_scale(block: BlockSpec, scale: PositionScale | None) -> BlockSpec:
    assert isinstance(block.attention, AttentionSpec), "Ministral 3 attends in every layer"
    return replace(block, attention=replace(block.attention, position_scale=scale))


MINISTRAL3 = Ministral(
    ClassDefaults(
        model_type="ministral3",
        window_rule="every",
        bias_rule="none",
        vocab_size=131_072,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=34,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=262_144,
        head_dim=128,
        norm_eps=1e-5,
        bos_token_id=1,
        eos_token_ids=(2,),
        rope_theta=1_000_000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 16.0,
            ORIGINAL: 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            BETA: 0.1,
        },
        computed_gguf=(LOG_MULTIPLIER,),
    ),
    gguf_names=("mistral3",),
    nested_in="mistral3",
    nested_ties=True,
)
