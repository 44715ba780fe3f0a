"""Granite 3 (dense and mixtures): Llama's block, with constant factors of embeddings, scores, sublayers and logits.

    embedding * embedding_multiplier        scores = q . k * attention_multiplier        logits / logits_scaling
    x += residual_multiplier * attention(norm(x));  x += residual_multiplier * mlp(norm(x))

    config.json   embedding_multiplier     attention_multiplier     residual_multiplier     logits_scaling
    GGUF          embedding_scale          attention.scale          residual_scale          logit_scale

    mixtures      block_sparse_moe.router.layer           router, [X, D]; transformers 5: block_sparse_moe.router
                  block_sparse_moe.input_linear           [X, 2F, D], gate first; ...experts.gate_up_proj
                  block_sparse_moe.output_linear          [X, D, F]; ...experts.down_proj
    GGUF          ffn_gate_inp; ffn_gate_exps, ffn_up_exps [X, F, D]; ffn_down_exps [X, D, F]

An expert's share is a softmax over the scores of the chosen experts; the residual multiplier is a factor of the shares.

Source: transformers, modeling_granite and modeling_granitemoe; llama.cpp, src/models/granite.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphcore.arch.architecture import Shapes, TensorSource, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys, as_float32
from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.families.llama import Llama
from graphcore.arch.families.mixtral import expert_fields, experts_of_width
from graphcore.arch.families.qwen_moe import EXPERTS, NEUTRAL_GGUF, ROUTER
from graphcore.arch.rotary import GATE_AND_UP, half_of_experts
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import AttentionSpec, BlockSpec, ModelSpec
from graphcore.routing import ScoredRouting

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
GGUF_MULTIPLIERS = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")


@dataclass(frozen=True)
class GraniteSettings:
    """The settings that only Granite has.

    Attributes:
        embedding_multiplier: factor of token embeddings.
        attention_multiplier: factor of q . k before the softmax.
        residual_multiplier: factor of each sublayer's output before it is added to the stream.
        logits_scaling: divisor of the logits.
    """

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    def cut(self, num_layers: int) -> "GraniteSettings":
        """Return the same settings, which concern all layers."""
        return self


class Granite(Llama):
    """The architecture of dense Granite models."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: that of Llama, with Granite's factors."""
        model, own = super().spec(config), _own(config)
        return replace(
            model,
            blocks=tuple(_with_factors(block, own) for block in model.blocks),
            embedding_scale=own.embedding_multiplier,
            logit_factor=1.0 / own.logits_scaling,
        )

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with Granite's multipliers; a missing one is 1."""
        return replace(config, own=GraniteSettings(*(fields.positive(name) or 1.0 for name in MULTIPLIERS)))

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with Granite's factors; scores have their usual one by default, as in llama.cpp."""
        keys.check_required(("logit_scale",))
        usual = {"attention.scale": config.attention.head_dim**-0.5}
        found = (keys.fields.number(keys.name(key)) or usual.get(key, 1.0) for key in GGUF_MULTIPLIERS)
        return replace(config, own=GraniteSettings(*found))

    def as_gguf(self, config: ModelConfig) -> ModelConfig:
        """Return the config with its factors rounded to float32."""
        return replace(config, own=GraniteSettings(*map(as_float32, vars(_own(config)).values())))

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the embedding, attention, residual and logit multipliers, by their names in config.json."""
        return vars(_own(config))

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the keys of Granite's factors."""
        return dict(zip(GGUF_MULTIPLIERS, map(float, vars(_own(config)).values()), strict=True))


class GraniteMoe(Granite):
    """The architecture of Granite's mixtures: experts in each layer."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: that of dense models, with experts instead of the MLP."""
        model = super().spec(config)
        # The same as a softmax over the chosen experts' scores, times the factor.
        shares = ScoredRouting("softmax", eps=0.0, factor=_own(config).residual_multiplier)
        mixture = replace(experts_of_width(config), shares=shares)
        return replace(model, blocks=tuple(replace(block, mlp=mixture) for block in model.blocks))

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; experts' gate and up are the halves of one."""
        index, leaf = split_layer(name)
        here = f"layers.{index}.block_sparse_moe."
        if leaf == ROUTER:
            return TensorSource(f"{here}router.layer.weight")
        if leaf in GATE_AND_UP:
            half = half_of_experts(leaf, config.intermediate_size)
            return TensorSource(f"{here}input_linear.weight", (half,))
        return TensorSource(f"{here}output_linear.weight" if leaf.startswith(EXPERTS) else name)

    def hf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the stored tensor, and for routers and experts also the parameter of transformers 5."""
        usual, (index, leaf) = self.hf_source(name, config), split_layer(name)
        here = f"layers.{index}.block_sparse_moe."
        if leaf == ROUTER:
            return usual, TensorSource(f"{here}router.weight")
        if not leaf.startswith(EXPERTS):
            return (usual,)
        parameter = "gate_up_proj" if leaf in GATE_AND_UP else "down_proj"
        return usual, TensorSource(f"{here}experts.{parameter}", usual.folds)

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the keys of Granite's factors and of the experts."""
        return {**super().gguf_fields(config), **expert_fields(config)}


def _own(config: ModelConfig) -> GraniteSettings:
    assert isinstance(config.own, GraniteSettings), "the config readers give every Granite its own settings"
    return config.own


def _with_factors(block: BlockSpec, own: GraniteSettings) -> BlockSpec:
    assert isinstance(block.attention, AttentionSpec), "Granite attends in every layer"
    attention = replace(block.attention, scale=own.attention_multiplier)
    return replace(block, attention=attention, residual_factor=own.residual_multiplier)


DEFAULTS = ClassDefaults(
    model_type="granite",
    window_rule="none",
    bias_rule="flags",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_ids=(2,),
    own_neutral=dict.fromkeys(MULTIPLIERS),
    own_neutral_gguf={"rope.scaling.finetuned": (True,)},  # Granite's files say false if nothing is rotated
    computed_gguf=GGUF_MULTIPLIERS,
)
GRANITE = Granite(DEFAULTS, gguf_names=("granite",))
GRANITE_MOE = GraniteMoe(
    replace(
        DEFAULTS,
        model_type="granitemoe",
        bias_rule="attention_flag",
        experts=ExpertsConfig(num_local_experts=8, num_experts_per_tok=2),
        own_neutral_gguf={**DEFAULTS.own_neutral_gguf, **NEUTRAL_GGUF},
    ),
    gguf_names=("granitemoe",),
)
