"""SmolLM3: Llama's block, in which every fourth layer does not rotate queries and keys (NoPE).

    config.json    no_rope_layers: for each layer 1 if it rotates, else 0; or no_rope_layer_interval, 4 by default
    GGUF           no key: every fourth layer does not rotate

With use_sliding_window, the layers that do not rotate have the window, unless layer_types says otherwise.

Source: transformers, configuration_smollm3 and modeling_smollm3; llama.cpp, src/models/smollm3.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphcore.arch.architecture import Shapes
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.families.llama import Llama
from graphcore.nn.spec import AttentionSpec, BlockSpec, ModelSpec

INTERVAL = 4  # distance between layers that do not rotate, where a file has no other


@dataclass(frozen=True)
class SmolLM3Settings:
    """The settings that only SmolLM3 has.

    Attributes:
        rotates: for each layer, True if queries and keys rotate.
    """

    rotates: tuple[bool, ...]

    def cut(self, num_layers: int) -> "SmolLM3Settings":
        """Return the settings of the model's first layers."""
        return SmolLM3Settings(self.rotates[:num_layers])


class SmolLM3(Llama):
    """The architecture of SmolLM3: Llama's, without a rotation in some layers."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: that of Llama, with layers that do not rotate."""
        model = super().spec(config)
        blocks = zip(model.blocks, _rotates(config), strict=True)
        return replace(model, blocks=tuple(block if rotates else _not_rotating(block) for block, rotates in blocks))

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return `no_rope_layers` of config.json: 1 for each layer with rope, 0 for one without."""
        return {"no_rope_layers": list(map(int, _rotates(config)))}

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with the layers that rotate, and those that slide if the file does not list them."""
        rotates = _read_rotates(fields, config.num_hidden_layers)
        attention = config.attention
        if attention.sliding_window is not None and fields.texts("layer_types") is None:
            types = tuple("full_attention" if turned else "sliding_attention" for turned in rotates)
            attention = replace(attention, layer_types=types)
        return replace(config, attention=attention, own=SmolLM3Settings(rotates))

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with llama.cpp's layers that rotate."""
        return replace(config, own=SmolLM3Settings(_by_interval(config.num_hidden_layers, INTERVAL)))


def _rotates(config: ModelConfig) -> tuple[bool, ...]:
    assert isinstance(config.own, SmolLM3Settings), "the config readers give every SmolLM3 its own settings"
    return config.own.rotates


def _read_rotates(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it rotates.

    Raises:
        CheckpointError: the list has other values than 0 and 1, or fewer than there are layers.
    """
    name = "no_rope_layers"
    if fields.raw.get(name) is None:
        return _by_interval(num_layers, fields.size("no_rope_layer_interval") or INTERVAL)
    stated = fields.indices(name)
    if len(stated) < num_layers or not set(stated) <= {0, 1}:
        raise fields.wrong(name, list(stated), f"a list of 0 or 1 for each of {num_layers} layers")
    return tuple(map(bool, stated[:num_layers]))


def _by_interval(num_layers: int, interval: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _not_rotating(block: BlockSpec) -> BlockSpec:
    assert isinstance(block.attention, AttentionSpec), "SmolLM3 attends in every layer"
    return replace(block, attention=replace(block.attention, rope=None))


SMOLLM3 = SmolLM3(
    ClassDefaults(
        model_type="smollm3",
        window_rule="opt_in",
        bias_rule="flags",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=11_008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=128_000,
        eos_token_ids=(128_001,),
        rope_theta=2_000_000.0,
        own_neutral={"no_rope_layers": None},
    ),
    gguf_names=("smollm3",),
)
