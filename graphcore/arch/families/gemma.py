"""Gemma 1 (2B, 7B, CodeGemma) and Gemma 2 (2B, 9B, 27B), and what Gemma 3 shares with them.

    Gemma 1    pre-norm blocks, full attention
    Gemma 2    sandwich norms, every other layer slides, soft caps on attention scores and logits

    decoder                      Hugging Face                 GGUF, Gemma 1     GGUF, Gemma 2 and 3
    input_layernorm              input_layernorm              attn_norm         attn_norm
    post_attention_layernorm     post_attention_layernorm     ffn_norm          post_attention_norm
    pre_feedforward_layernorm    pre_feedforward_layernorm    -                 ffn_norm
    post_feedforward_layernorm   post_feedforward_layernorm   -                 post_ffw_norm

Norms are stored as w in safetensors and as 1 + w in GGUF files; they multiply in float32. GGUF has no key for Gemma 2's
query scalar: llama.cpp takes hidden / heads in files of 46 layers (the 27B), and head_dim in all others.

Source: transformers, modeling_gemma and modeling_gemma2; llama.cpp, src/models/gemma.cpp and gemma2.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import WINDOW, WINDOW_PATTERN, GGUFKeys
from graphcore.arch.config.layer_types import layer_types_of_pattern
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.folds import AddOne
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import ModelSpec, NormSpec

SANDWICH_LEAVES = {
    **GGUF_LEAVES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LAYERS_OF_GEMMA2_27B = 46
SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"  # names in config.json and in GGUF files
USUAL_CAPS = {SCORE_CAP: 50.0, LOGIT_CAP: 30.0}  # where a file does not state them
TANH, ERF = "gelu_pytorch_tanh", "gelu"


@dataclass(frozen=True)
class SoftCaps:
    """The soft caps of Gemma 2: bounds of the attention scores and of the logits; 0 for none."""

    scores: float
    logits: float

    def cut(self, num_layers: int) -> "SoftCaps":
        """Return self, because the caps are those of all layers."""
        return self


class Gemma(Architecture):
    """The architecture of Gemma 1: a plain rotary decoder with GeGLU and embeddings scaled by sqrt(dim).

    Attributes:
        leaves: names of modules in llama.cpp, by the decoder's.
    """

    leaves: ClassVar[Mapping[str, str]] = GGUF_LEAVES

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with scaled embeddings."""
        scale = config.hidden_size**0.5
        return rotary_spec(config, gemma_norm(config), has_qk_norm=False, embedding_scale=scale)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor of the same name; norms are stored as w, and the decoder needs 1 + w."""
        return TensorSource(name, (AddOne(),) if name.endswith("norm.weight") else ())

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name; its converter has already added 1 to norms."""
        return TensorSource(gguf_name(name, self.leaves))

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with GELU's tanh form where the file says "gelu", as the first published files do."""
        return replace(config, hidden_act=TANH) if config.hidden_act == ERF else config


class Gemma2(Gemma):
    """The architecture of Gemma 2: sandwich norms, alternating sliding and full layers, and two soft caps."""

    leaves = SANDWICH_LEAVES

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with sandwich norms, capped scores and capped logits."""
        caps, scale = _caps_of(config), config.hidden_size**0.5
        model = rotary_spec(config, gemma_norm(config), False, sandwich=True, embedding_scale=scale, cap=caps.scores)
        return replace(model, logit_cap=caps.logits)

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the soft caps."""
        caps = _caps_of(config)
        return {SCORE_CAP: caps.scores or None, LOGIT_CAP: caps.logits or None}

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with the soft caps; null is none, and an absent one has the class default.

        Raises:
            CheckpointError: a cap is not above zero.
        """
        scores, logits = (
            0.0 if fields.is_null(name) else fields.positive(name) or USUAL_CAPS[name] for name in USUAL_CAPS
        )
        return replace(config, own=SoftCaps(scores, logits))

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with the soft caps, the query scalar, and the window of files that do not state it.

        Files of the first converters lack the window; llama.cpp takes 4096. A cap of 0 is none.

        Raises:
            CheckpointError: a cap is negative.
        """
        stated = {name: keys.fields.number(keys.name(name)) for name in USUAL_CAPS}
        wrong = next((name for name, cap in stated.items() if cap is not None and cap < 0), None)
        if wrong is not None:
            raise keys.fields.wrong(keys.name(wrong), stated[wrong], "0 or above")
        scores, logits = (USUAL_CAPS[name] if cap is None else cap for name, cap in stated.items())
        config = replace(with_query_scalar(config, LAYERS_OF_GEMMA2_27B), own=SoftCaps(scores, logits))
        return config if keys.fields.raw.get(keys.name(WINDOW)) is not None else _with_usual_window(config, keys)

    def as_gguf(self, config: ModelConfig) -> ModelConfig:
        """Return the config with the caps rounded to float32."""
        caps = _caps_of(config)
        scores, logits = torch.tensor((caps.scores, caps.logits), dtype=torch.float32, device="cpu").tolist()
        return replace(config, own=SoftCaps(scores, logits))

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the keys of the window and the soft caps."""
        attention, caps = config.attention, _caps_of(config)
        found: dict[str, MetadataScalar] = {WINDOW: attention.sliding_window or 0}
        if attention.sliding_window_pattern is not None:
            found[WINDOW_PATTERN] = attention.sliding_window_pattern
        return {**found, SCORE_CAP: caps.scores, LOGIT_CAP: caps.logits}


def gemma_norm(config: ModelConfig) -> NormSpec:
    """Return the spec of all norms of a Gemma model."""
    return NormSpec("rms", config.norm_eps, scale_in_float32=True)


def with_query_scalar(config: ModelConfig, layers_of_27b: int) -> ModelConfig:
    """Return the config of a GGUF file with the query scalar, which GGUF does not store.

    Args:
        layers_of_27b: number of layers of the one size whose scalar is hidden / heads; others have head_dim.
    """
    attention, is_27b = config.attention, config.num_hidden_layers == layers_of_27b
    scalar = config.hidden_size / attention.num_attention_heads if is_27b else attention.head_dim
    return replace(config, attention=replace(attention, query_pre_attn_scalar=float(scalar)))


def _caps_of(config: ModelConfig) -> SoftCaps:
    assert isinstance(config.own, SoftCaps), "the config readers give every Gemma 2 its caps"
    return config.own


def _with_usual_window(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    defaults = keys.defaults
    pattern = keys.size(WINDOW_PATTERN) or defaults.sliding_window_pattern
    attention = replace(
        config.attention,
        sliding_window=defaults.sliding_window,
        sliding_window_pattern=pattern,
        layer_types=layer_types_of_pattern(config.num_hidden_layers, pattern),
    )
    return replace(config, attention=attention)


GEMMA = Gemma(
    ClassDefaults(
        model_type="gemma",
        window_rule="none",
        bias_rule="attention_flag",
        vocab_size=256_000,
        hidden_size=3072,
        intermediate_size=24_576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=8192,
        head_dim=256,
        hidden_act=TANH,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_ids=(1,),
    ),
    gguf_names=("gemma",),
)
GEMMA2 = Gemma2(
    ClassDefaults(
        model_type="gemma2",
        window_rule="pattern",
        bias_rule="attention_flag",
        vocab_size=256_000,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        head_dim=256,
        hidden_act=TANH,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_ids=(1,),
        sliding_window=4096,
        sliding_window_pattern=2,
        query_pre_attn_scalar=256.0,
        own_names={"hidden_act": ("hidden_activation",)},
        own_neutral={SCORE_CAP: None, LOGIT_CAP: None},
        computed_gguf=(SCORE_CAP, LOGIT_CAP),
    ),
    gguf_names=("gemma2",),
)
