"""Phi 3 (mini, medium), Phi 3.5 mini, Phi 4 and Phi 4 mini: Llama's block, with fused projections and LongRoPE.

    decoder                       Hugging Face               GGUF
    self_attn.q, k, v_proj        self_attn.qkv_proj         attn_qkv, in this order; or attn_q, attn_k, attn_v
    mlp.gate_proj, up_proj        mlp.gate_up_proj [2F, D]   ffn_up [2F, D], gate first
    rotary divisors               rope_scaling               rope_factors_short, rope_factors_long

LongRoPE divides the rotary frequencies by one of two lists. transformers takes the short one for a sequence of up to
original_max_position_embeddings tokens and the long one for a longer one, whose cached keys were then rotated
otherwise. Here, as in llama.cpp, the engine's context_length decides for all sequences: short up to the original
context, else long. (nn/rope.py chooses when it makes the table.)

Source: transformers, configuration_phi3 and modeling_phi3; llama.cpp, src/models/phi3.cpp.
"""

from collections.abc import Mapping

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import WINDOW, GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config.rope_parameters import ORIGINAL
from graphcore.arch.folds import Fold
from graphcore.arch.rotary import FUSED_MLP, GGUF_LEAVES, QKV, rotary_spec, rows_of_gate_and_up, rows_of_qkv
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.errors import UnsupportedError
from graphcore.nn.spec import ModelSpec, NormSpec

HF_LEAVES = {**dict.fromkeys(QKV, "self_attn.qkv_proj"), **dict.fromkeys(FUSED_MLP, "mlp.gate_up_proj")}
LEAVES = {**GGUF_LEAVES, **dict.fromkeys(QKV, "attn_qkv"), **dict.fromkeys(FUSED_MLP, "ffn_up")}
ATTENTION_FACTOR = "rope.scaling.attn_factor"  # key of longrope's factor of cosines and sines


class Phi3(Architecture):
    """The architecture of Phi 3 and Phi 4: a plain rotary decoder whose heads may rotate in part."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with RMSNorm."""
        return rotary_spec(config, NormSpec("rms", config.norm_eps), has_qk_norm=False)

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return longrope's original context, and no token for padding, as the default is beyond small vocabularies."""
        scaling = None if config.rope is None else config.rope.scaling
        original = {} if scaling is None or ORIGINAL not in scaling else {ORIGINAL: int(scaling[ORIGINAL])}
        return {"pad_token_id": None, **original}

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; q, k and v are rows of one, gate and up of another."""
        index, leaf = split_layer(name)
        module, _, parameter = leaf.rpartition(".")
        if module not in HF_LEAVES:
            return TensorSource(name)
        return TensorSource(f"layers.{index}.{HF_LEAVES[module]}.{parameter}", _rows_of(module, config))

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name; q, k and v are rows of one, gate and up of another."""
        module = split_layer(name)[1].rpartition(".")[0]
        return TensorSource(gguf_name(name, LEAVES), _rows_of(module, config))

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the fused tensor, and for q, k and v also a separate one, which llama.cpp reads, too."""
        module, fused = split_layer(name)[1].rpartition(".")[0], self.gguf_source(name, config)
        return (fused, TensorSource(gguf_name(name, GGUF_LEAVES))) if module in QKV else (fused,)

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config unchanged, after a check that longrope's factor comes with its divisors.

        Raises:
            UnsupportedError: the file has the factor alone.
        """
        assert config.rope is not None, "every Phi 3 rotates"
        factor = keys.fields.number(keys.name(ATTENTION_FACTOR)) or 1.0
        if config.rope.short_factors is None and factor != 1.0:
            raise UnsupportedError(
                f"{keys.fields.source}: {keys.name(ATTENTION_FACTOR)} is {factor}, but the file has no "
                "rope_factors_long.weight and rope_factors_short.weight; fetch it again or convert it anew"
            )
        return config

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the keys of the window, which llama.cpp ignores, and of longrope."""
        found: dict[str, MetadataScalar] = {WINDOW: config.attention.sliding_window or 0}
        scaling = None if config.rope is None else config.rope.scaling
        if scaling is not None and scaling["rope_type"] == "longrope":
            found["rope.scaling.original_context_length"] = int(scaling[ORIGINAL])
            found[ATTENTION_FACTOR] = float(scaling["attention_factor"])
        return found


def _rows_of(module: str, config: ModelConfig) -> tuple[Fold, ...]:
    """Return the fold that picks a projection's rows out of the fused one; none for other modules."""
    if module in FUSED_MLP:
        return (rows_of_gate_and_up(module, config),)
    return (rows_of_qkv(module, config),) if module in QKV else ()


PHI3 = Phi3(
    ClassDefaults(
        model_type="phi3",
        window_rule="every",
        bias_rule="none",
        vocab_size=32_064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=None,
        max_position_embeddings=4096,
        norm_eps=1e-5,
        bos_token_id=1,
        eos_token_ids=(32_000,),
        partial_rotary_factor=1.0,
        original_context=4096,
        rope_types={"su": "longrope", "yarn": "longrope"},
        own_neutral={"partial_rotary_factor": None},
        computed_gguf=(ATTENTION_FACTOR,),
    ),
    gguf_names=("phi3",),
)
