"""DeepSeek V2, V3, R1 and V3.1, Kimi K2 and K2.5's text, and GLM 4.7 Flash: latent attention, mixtures of experts.

    Hugging Face  self_attn.q_proj               [H (N + R), D], or q_a_proj, q_a_layernorm and q_b_proj
                  self_attn.kv_a_proj_with_mqa   [C + R, D], latent features and the key that heads share
                  self_attn.kv_b_proj            [H (N + V), C], for each head rows of keys, then rows of values
                  mlp.gate, mlp.experts, mlp.shared_experts, mlp.gate.e_score_correction_bias as in glm_moe.py
    GGUF          attn_q or attn_q_a, attn_q_a_norm, attn_q_b; attn_kv_a_mqa, attn_kv_a_norm
                  attn_k_b [H, C, N], attn_v_b [H, V, C]; or attn_kv_b as in Hugging Face's (before May 2025)

(H heads, D model dim, N query features without rotation, R rotated features, C latent features, V values.)

nn/latent_attention.py multiplies queries with the rows of keys (`k_b_proj`, transposed), and outputs with those of
values (`v_b_proj`). Rotated features are stored as interleaved pairs.

DeepSeek V2 chooses experts by a softmax and ranks groups by their best expert; V3, Kimi K2 and GLM by sigmoids with a
selection bias, and by the sum of a group's two best. GGUF files are computed so, too, where llama.cpp ranks V2's groups
by the sum. Without a score function a file has sigmoids if it has a selection bias; llama.cpp takes a softmax, unless
the sizes are GLM 4.7 Flash's. Kimi K2 is DeepSeek V3 under another name. Multi-token-prediction layers, stored behind
the last layer, are left out.

The norms of compressed queries and of latent features have an epsilon of 1e-6 in transformers, whatever the config
says, and the model's in llama.cpp.

Source: transformers, modeling_deepseek_v2, modeling_deepseek_v3 and modeling_glm4_moe_lite; llama.cpp,
src/models/deepseek2.cpp and conversion/deepseek.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from graphcore.arch.architecture import Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import SIZES, ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig, RopeParameters
from graphcore.arch.config.rope_parameters import yarn_attention_factor
from graphcore.arch.config.typed_fields import LARGEST_SIZE, Fields
from graphcore.arch.families.glm_moe import LEAVES as MIXTURE_LEAVES
from graphcore.arch.families.glm_moe import SELECTION_BIAS, GlmMoe
from graphcore.arch.families.qwen_moe import expert_settings_of, expert_width, mixture_spec
from graphcore.arch.folds import AsHeads, Fold, PickParts, PickRows, SplitPairs, Transpose
from graphcore.arch.rotary import longest_context, rope_of
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.nn.spec import AttentionSpec, BlockSpec, LatentSpec, MLPSpec, ModelSpec, NormSpec
from graphcore.routing import ScoredRouting

LATENT_EPS = 1e-6  # default of transformers' DeepseekV3RMSNorm, which these norms keep
LEAVES = {
    **MIXTURE_LEAVES,
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
ATTENTION = "self_attn."
K_B, V_B = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
# Names of the stored matrices that are divided, in safetensors and in GGUF.
QUERIES = ("q_proj", "attn_q")
QUERIES_OF_RANK = ("q_b_proj", "attn_q_b")
LATENT = ("kv_a_proj_with_mqa", "attn_kv_a_mqa")
KEYS_AND_VALUES = ("kv_b_proj", "attn_kv_b")
HF_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LatentSettings:
    """The settings of latent attention, with the names of Hugging Face's config.json, and of the choice of experts.

    Attributes:
        q_lora_rank: number of features of compressed queries; 0 if queries are one projection.
        is_interleaved: True if rotated features are stored as interleaved pairs.
        mscale_all_dim: number that YaRN's factor of all scores follows from; 0 for none.
        norm_eps: epsilon of the norms of compressed queries and of latent features.
        has_selection_bias: True if each expert has a selection bias.
    """

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    is_interleaved: bool
    mscale_all_dim: float
    norm_eps: float
    has_selection_bias: bool

    def cut(self, num_layers: int) -> "LatentSettings":
        """Return the settings of the model's first layers: the same."""
        return self


@dataclass(frozen=True)
class DeepSeek(GlmMoe):
    """The architecture of DeepSeek V2 and V3, and of models with their attention.

    Attributes:
        latent: default sizes of latent attention, and the interleaving of rotated features.
        num_predicting_layers: default number of multi-token-prediction layers.
    """

    latent: LatentSettings | None = None
    num_predicting_layers: int = 0

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: latent attention, dense layers, then layers with experts."""
        own, norm = _own(config), NormSpec("rms", config.norm_eps)
        dense = MLPSpec(config.intermediate_size, config.hidden_act)
        has_bias = own.has_selection_bias
        mixture = replace(mixture_spec(config), selection_bias=has_bias, shared_gate=False, scores_in_float32=True)
        block = BlockSpec(config.hidden_size, norm, _attention(config), dense)
        dense_layers = expert_settings_of(config).mlp_only_layers
        layers = range(config.num_hidden_layers)
        return ModelSpec(
            dim=config.hidden_size,
            vocab=config.vocab_size,
            blocks=tuple(block if layer in dense_layers else replace(block, mlp=mixture) for layer in layers),
            norm=norm,
            context=longest_context(config),
            tied=config.tie_word_embeddings,
        )

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the sizes of latent attention, the choice of experts, and YaRN's factor of scores."""
        own, routing = _own(config), expert_settings_of(config).routing
        assert routing is not None, "these experts have scores of their own"
        found: dict[str, object] = {
            **{name: getattr(own, name) for name in HF_SIZES},
            "q_lora_rank": own.q_lora_rank or None,
            "rope_interleave": own.is_interleaved,
        }
        if routing.function == "softmax":
            found["topk_method"] = "greedy" if routing.groups == 1 else "group_limited_greedy"
        if own.mscale_all_dim and config.rope_parameters is not None:
            found["rope_parameters"] = {**config.rope_parameters, "mscale_all_dim": own.mscale_all_dim}
        return found

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; matrices of attention are rows of four stored ones."""
        index, leaf = split_layer(name)
        part = _part_of(leaf, config, _own(config).is_interleaved)
        if part is None:
            return super().hf_source(name, config)
        (stored, _), folds = part
        return TensorSource(f"layers.{index}.{ATTENTION}{stored}.{leaf.rpartition('.')[2]}", folds)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name; its rotated features are interleaved, whatever the config says."""
        index, leaf = split_layer(name)
        if leaf == SELECTION_BIAS:
            return super().gguf_source(name, config)
        part = None if leaf in (K_B, V_B) else _part_of(leaf, config, is_interleaved=True)
        if part is None:
            return TensorSource(gguf_name(name, LEAVES))
        (_, stored), folds = part
        return TensorSource(f"blk.{index}.{stored}.{leaf.rpartition('.')[2]}", folds)

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the tensor; k_b_proj and v_b_proj may also be rows of attn_kv_b, in files from before May 2025."""
        index, leaf = split_layer(name)
        part = _part_of(leaf, config, is_interleaved=True)
        if leaf not in (K_B, V_B) or part is None:
            return super().gguf_sources(name, config)
        (_, stored), folds = part
        return self.gguf_source(name, config), TensorSource(f"blk.{index}.{stored}.weight", folds)

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with the sizes of latent attention, and of the layers with and without experts."""
        usual = self.latent
        assert usual is not None, "each model type has default sizes"
        if config.attention.num_key_value_heads != config.attention.num_attention_heads:
            raise UnsupportedError(
                f"{fields.source}: num_key_value_heads {config.attention.num_key_value_heads} is not "
                f"num_attention_heads {config.attention.num_attention_heads}; latent attention has keys for each head"
            )
        has_rank = not fields.is_null("q_lora_rank")
        own = LatentSettings(
            kv_lora_rank=fields.size("kv_lora_rank") or usual.kv_lora_rank,
            q_lora_rank=(fields.size("q_lora_rank") or usual.q_lora_rank) if has_rank else 0,
            qk_nope_head_dim=fields.size("qk_nope_head_dim") or usual.qk_nope_head_dim,
            qk_rope_head_dim=config.attention.head_dim,
            v_head_dim=fields.size("v_head_dim") or usual.v_head_dim,
            is_interleaved=fields.switch("rope_interleave", usual.is_interleaved),
            mscale_all_dim=_mscale_of(config.rope, fields),
            norm_eps=LATENT_EPS,
            has_selection_bias=usual.has_selection_bias,
        )
        experts = replace(
            expert_settings_of(config),
            shared_expert_intermediate_size=_shared_width(config, fields, self.defaults),
            mlp_only_layers=_dense_layers(config, fields, self.defaults),
        )
        predicting = fields.count("num_nextn_predict_layers", LARGEST_SIZE, self.num_predicting_layers)
        return replace(config, own=own, experts=experts, num_predicting_layers=predicting)

    def gguf_defaults(self, gguf_name: str) -> ClassDefaults:
        """Return the defaults of GGUF files: those of V2, which its older files rely on."""
        return self.defaults

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with the sizes of latent attention and of the layers; experts of sigmoids are V3's."""
        keys.check_required(("attention.kv_lora_rank", "rope.dimension_count", "leading_dense_block_count"))
        rotated, rank = keys.required_size("rope.dimension_count"), keys.required_size("attention.kv_lora_rank")
        key_width = keys.size("attention.key_length_mla") or keys.size("attention.key_length") or 0
        value_width = keys.size("attention.value_length_mla") or keys.size("attention.value_length") or 0
        if key_width <= rotated or not value_width or rotated % 2:
            raise CheckpointError(
                f"{keys.fields.source}: heads of {key_width} features of which {rotated} rotate, with {value_width} "
                "values, are no latent attention; fetch the file again or convert it anew"
            )
        multiplier = keys.fields.number(keys.name("rope.scaling.yarn_log_multiplier")) or 0.0
        own = LatentSettings(
            kv_lora_rank=rank,
            q_lora_rank=keys.size("attention.q_lora_rank") or 0 if "blk.0.attn_q.weight" not in shapes else 0,
            qk_nope_head_dim=key_width - rotated,
            qk_rope_head_dim=rotated,
            v_head_dim=value_width,
            is_interleaved=True,
            mscale_all_dim=multiplier / MULTIPLIER,
            norm_eps=config.norm_eps,
            has_selection_bias=any(name.endswith("exp_probs_b.bias") for name in shapes),
        )
        has_bias = "blk.0.attn_kv_a_mqa.bias" in shapes
        attention = replace(
            config.attention,
            num_key_value_heads=config.attention.num_attention_heads,
            head_dim=rotated,
            qkv_bias=has_bias,
        )
        experts, rope = _gguf_experts(config, own, keys), _gguf_rope(config, multiplier, keys)
        is_v2 = experts.routing is not None and experts.routing.function == "softmax"
        model_type = self.model_type if is_v2 else DEEPSEEK_V3.model_type
        return replace(config, model_type=model_type, own=own, attention=attention, experts=experts, rope=rope)

    def as_gguf(self, config: ModelConfig) -> ModelConfig:
        """Return the config as it is read back from a GGUF file: llama.cpp's epsilon, and numbers in float32."""
        own, experts = _own(config), expert_settings_of(config)
        assert experts.routing is not None, "these experts have scores of their own"
        own = replace(
            own,
            norm_eps=float(np.float32(config.norm_eps)),
            is_interleaved=True,
            mscale_all_dim=float(np.float32(own.mscale_all_dim * MULTIPLIER)) / MULTIPLIER,
        )
        routing = experts.routing._replace(factor=float(np.float32(experts.routing.factor)))
        return replace(config, own=own, experts=replace(experts, routing=routing))

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the keys of latent attention, of the experts and of their choice."""
        own = _own(config)
        found: dict[str, MetadataScalar | tuple[int, ...]] = {
            **super().gguf_fields(config),
            "attention.head_count_kv": 1,
            "attention.key_length": own.kv_lora_rank + own.qk_rope_head_dim,
            "attention.value_length": own.kv_lora_rank,
            "attention.key_length_mla": own.qk_nope_head_dim + own.qk_rope_head_dim,
            "attention.value_length_mla": own.v_head_dim,
            "attention.kv_lora_rank": own.kv_lora_rank,
            "rope.dimension_count": own.qk_rope_head_dim,
        }
        if own.q_lora_rank:
            found["attention.q_lora_rank"] = own.q_lora_rank
        if own.mscale_all_dim:
            found["rope.scaling.yarn_log_multiplier"] = own.mscale_all_dim * MULTIPLIER
        return found


MULTIPLIER = 0.1  # of mscale_all_dim in GGUF files of this architecture


def _own(config: ModelConfig) -> LatentSettings:
    assert isinstance(config.own, LatentSettings), "the config readers give every DeepSeek its own settings"
    return config.own


def _attention(config: ModelConfig) -> AttentionSpec:
    own, rope = _own(config), config.rope
    assert rope is not None, "every DeepSeek rotates"
    factor = 1.0
    if own.mscale_all_dim and rope.scaling is not None:
        factor = yarn_attention_factor(float(rope.scaling["factor"]), own.mscale_all_dim)
    return AttentionSpec(
        heads=config.attention.num_attention_heads,
        kv_heads=1,
        head_dim=own.qk_rope_head_dim + own.kv_lora_rank,
        scale=(own.qk_nope_head_dim + own.qk_rope_head_dim) ** -0.5 * factor * factor,
        rope=replace(rope_of(rope), width=own.qk_rope_head_dim),
        qkv_bias=config.attention.qkv_bias,
        output_bias=config.attention.output_bias,
        latent=LatentSpec(
            rank=own.kv_lora_rank,
            rotated=own.qk_rope_head_dim,
            nope=own.qk_nope_head_dim,
            value_dim=own.v_head_dim,
            query_rank=own.q_lora_rank,
            eps=own.norm_eps,
        ),
    )


def _part_of(leaf: str, config: ModelConfig, is_interleaved: bool) -> tuple[tuple[str, str], tuple[Fold, ...]] | None:
    """Return the names of the stored matrix that a matrix of attention is part of, and the folds; None for others."""
    own, heads = _own(config), config.attention.num_attention_heads
    nope, rotated, rank = own.qk_nope_head_dim, own.qk_rope_head_dim, own.kv_lora_rank
    queries = QUERIES_OF_RANK if own.q_lora_rank else QUERIES

    def in_halves(count: int) -> tuple[Fold, ...]:
        return (SplitPairs(count),) if is_interleaved else ()

    match leaf.rpartition(".")[0].removeprefix(ATTENTION):
        case "q_nope_proj":
            return queries, (PickParts(heads, ((0, nope),)),)
        case "q_rope_proj":
            return queries, (PickParts(heads, ((nope, nope + rotated),)), *in_halves(heads))
        case "kv_a_proj":
            return LATENT, (PickRows(0, rank),)
        case "k_rope_proj":
            return LATENT, (PickRows(rank, rank + rotated), *in_halves(1))
        case "k_b_proj":
            return KEYS_AND_VALUES, (PickParts(heads, ((0, nope),)), AsHeads(heads), Transpose())
        case "v_b_proj":
            return KEYS_AND_VALUES, (PickParts(heads, ((nope, nope + own.v_head_dim),)), AsHeads(heads))
    return None


def _mscale_of(rope: RopeParameters | None, fields: Fields) -> float:
    """Return YaRN's mscale_all_dim, which counts with any scaling; 0 without one."""
    if rope is None or rope.scaling is None:
        return 0.0
    stated = (fields.section(name).number("mscale_all_dim") for name in ("rope_parameters", "rope_scaling"))
    return next(filter(None, stated), 0.0)


def _shared_width(config: ModelConfig, fields: Fields, defaults: ClassDefaults) -> int | None:
    """Return the hidden width of all shared experts together; None without them."""
    usual, width = defaults.experts, expert_width(expert_settings_of(config))
    assert usual is not None, "each model type has default sizes"
    count = (usual.shared_expert_intermediate_size or 0) // expert_width(usual)
    return fields.count("n_shared_experts", LARGEST_SIZE, count) * width or None


def _dense_layers(config: ModelConfig, fields: Fields, defaults: ClassDefaults) -> tuple[int, ...]:
    """Return the layers without experts: the listed ones, or the first ones and all but each moe_layer_freq-th."""
    num_layers, kinds = config.num_hidden_layers, fields.texts("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
            raise fields.wrong("mlp_layer_types", kinds, f'"dense" or "sparse" for each of {num_layers} layers')
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    usual = len(defaults.experts.mlp_only_layers) if defaults.experts is not None else 0
    first, step = fields.count("first_k_dense_replace", LARGEST_SIZE, usual), fields.size("moe_layer_freq") or 1
    return tuple(layer for layer in range(num_layers) if layer < first or layer % step)


def _gguf_experts(config: ModelConfig, own: LatentSettings, keys: GGUFKeys) -> ExpertsConfig:
    """Return the experts of a GGUF file; without a score function, sigmoids have a selection bias."""
    experts = expert_settings_of(config)
    routing = experts.routing
    assert routing is not None, "these experts have scores of their own"
    if keys.fields.raw.get(keys.name("expert_gating_func")) in (None, 0):
        routing = routing._replace(function="sigmoid" if own.has_selection_bias else "softmax")
    shared = keys.fields.count(keys.name("expert_shared_count"), LARGEST_SIZE)
    dense = keys.fields.count(keys.name("leading_dense_block_count"), LARGEST_SIZE)
    return replace(
        experts,
        shared_expert_intermediate_size=shared * expert_width(experts) or None,
        mlp_only_layers=tuple(range(min(dense, config.num_hidden_layers))),
        routing=routing._replace(ranked_by=1 if routing.function == "softmax" else 2),
    )


def _gguf_rope(config: ModelConfig, multiplier: float, keys: GGUFKeys) -> RopeParameters | None:
    """Return the rotation; as in llama.cpp, YaRN's factors of cosines and of scores are one, and cancel out."""
    rope = config.rope
    if rope is None or rope.scaling is None or rope.scaling["rope_type"] != "yarn":
        return rope
    if not multiplier:
        raise UnsupportedError(
            f"{keys.fields.source}: YaRN without {keys.name('rope.scaling.yarn_log_multiplier')} is not supported; "
            "convert the model anew"
        )
    return replace(rope, scaling={**rope.scaling, "attention_factor": 1.0})


def _defaults(**own: object) -> ClassDefaults:
    """Return the defaults of a model type: those of all types here, and its own."""
    usual = {
        "window_rule": "none",
        "bias_rule": "attention_flag",
        "bos_token_id": 0,
        "eos_token_ids": (1,),
        "head_dim": 64,
        "own_names": {
            "num_local_experts": ("n_routed_experts",),
            "head_dim": ("qk_rope_head_dim",),
            "num_nextn_predict_layers": ("num_mtp_layers",),
        },
        "computed_gguf": (
            *("expert_shared_count", "nextn_predict_layers", "rope.scaling.yarn_log_multiplier"),
            *("rope.dimension_count", "attention.key_length", "attention.value_length"),
        ),
    }
    return ClassDefaults(**{**usual, **own})  # type: ignore[arg-type]  # fields by name


NEUTRAL = {"n_routed_experts": None, "n_shared_experts": None, "first_k_dense_replace": None}
V3_EXPERTS = ExpertsConfig(
    num_local_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    shared_expert_intermediate_size=2048,
    mlp_only_layers=(0, 1, 2),
    routing=ScoredRouting("sigmoid", groups=8, used_groups=4, factor=2.5),
)
LATENT_V3 = LatentSettings(512, 1536, 128, 64, 128, True, 0.0, LATENT_EPS, has_selection_bias=True)
DEEPSEEK_V2 = DeepSeek(
    _defaults(
        model_type="deepseek_v2",
        vocab_size=102_400,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=None,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_ids=(2,),
        experts=ExpertsConfig(
            num_local_experts=64,
            num_experts_per_tok=6,
            moe_intermediate_size=1407,
            norm_topk_prob=False,
            shared_expert_intermediate_size=2 * 1407,
            routing=ScoredRouting("softmax", ranked_by=1, normalises=False),
        ),
        own_neutral={
            **NEUTRAL,
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),
            "mlp_bias": (False,),
            "topk_method": ("greedy", "group_limited_greedy"),
            "rope_interleave": (True,),
        },
        required=(*SIZES, "num_experts_per_tok"),
    ),
    gguf_names=("deepseek2",),
    latent=replace(LATENT_V3, has_selection_bias=False),
)
DEEPSEEK_V3 = DeepSeek(
    _defaults(
        model_type="deepseek_v3",
        vocab_size=129_280,
        hidden_size=7168,
        intermediate_size=18_432,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        max_position_embeddings=4096,
        experts=V3_EXPERTS,
        own_neutral={**NEUTRAL, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ),
    gguf_names=("deepseek2",),
    is_read_from_gguf=False,
    other_types=("kimi_k2",),
    nested_in="kimi_k25",
    hf_prefixes=("model.", "language_model.model.", "language_model.", "model.language_model.", ""),
    unused={"vision_tower.": "vision", "mm_projector.": "its projector"},
    latent=LATENT_V3,
    num_predicting_layers=1,
)
GLM4_MOE_LITE = DeepSeek(
    _defaults(
        model_type="glm4_moe_lite",
        vocab_size=154_880,
        hidden_size=2048,
        intermediate_size=10_240,
        num_hidden_layers=47,
        num_attention_heads=20,
        num_key_value_heads=20,
        max_position_embeddings=202_752,
        norm_eps=1e-5,
        experts=ExpertsConfig(
            num_local_experts=64,
            num_experts_per_tok=4,
            moe_intermediate_size=1536,
            shared_expert_intermediate_size=1536,
            mlp_only_layers=(0,),
            routing=ScoredRouting("sigmoid", factor=1.8),
        ),
        own_neutral={**NEUTRAL, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ),
    gguf_names=("deepseek2",),
    is_read_from_gguf=False,
    latent=LatentSettings(512, 768, 192, 64, 256, True, 0.0, LATENT_EPS, has_selection_bias=True),
)
