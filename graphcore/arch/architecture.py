"""The interface of an architecture: the defaults of its settings, its spec, and the source of each weight.

    config.json, GGUF metadata --defaults, gguf_names--> ModelConfig
    ModelConfig --spec()--> ModelSpec --nn--> Decoder with named buffers, such as layers.3.self_attn.q_proj.weight
    each name --hf_source() or gguf_source()--> the stored tensor, and the folds that convert it to the decoder's form

The decoder's names are Hugging Face's without "model.", so most entries of a weight map are the identity.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.folds import Fold
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import ModelSpec

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorSource:
    """The source of a weight: the name of a stored tensor, and the folds that are applied to it in order."""

    name: str
    folds: tuple[Fold, ...] = ()


@dataclass(frozen=True)
class Architecture(ABC):
    """A model type, with everything in graphcore that is specific to it.

    Attributes:
        defaults: defaults of settings that its config.json omits, and the type's own names of settings.
        gguf_names: names of the type in GGUF's general.architecture; `task=pack` writes the first.
        is_read_from_gguf: True if GGUF files with these names are read as this type; False if another type has the
            same names.
        is_read_with_window: True if GGUF files with these names that state a sliding window are read as this type.
        other_types: further values of model_type in config.json that name the same mathematics.
        nested_in: multimodal model type whose text_config describes a model of this type; None if there is none.
        nested_ties: True if the multimodal type ties the head to the embedding unless its config says otherwise.
        hf_prefixes: possible prefixes of the decoder's names in safetensors, the likeliest first.
        ignored: substrings of the names of stored tensors that text generation does not use.
        unused: names of parts of a model that are left out with a note, by substring of their tensors' names.
    """

    defaults: ClassDefaults
    gguf_names: tuple[str, ...] = ()
    is_read_from_gguf: bool = True
    is_read_with_window: bool = False
    other_types: tuple[str, ...] = ()
    nested_in: str | None = None
    nested_ties: bool = False
    hf_prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    unused: Mapping[str, str] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """Name of the model type in config.json."""
        return self.defaults.model_type

    @abstractmethod
    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec of the model, which says what it computes."""

    @abstractmethod
    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the source of the decoder's buffer `name` in safetensors, without the prefix."""

    @abstractmethod
    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the source of the decoder's buffer `name` in a GGUF file."""

    def check_gguf(self, checkpoint: Checkpoint, config: ModelConfig, num_layers: int) -> None:  # noqa: B027  # optional
        """Check a GGUF file by the family's own rules; by default there are none.

        Args:
            num_layers: number of layers in the file; `config` may ask for only the first ones.

        Raises:
            CheckpointError: the file breaks a rule.
        """

    def ignores(self, name: str, config: ModelConfig) -> bool:
        """Return whether text generation does not use the stored tensor `name`; a family may add to `ignored`."""
        return any(part in name for part in self.ignored)

    def gguf_defaults(self, gguf_name: str) -> ClassDefaults:
        """Return the defaults of settings that GGUF files with one of `gguf_names` omit."""
        return self.defaults

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config completed by settings that are specific to this model type; by default unchanged.

        Args:
            config: config read from the settings that all models have.
            fields: settings of the language model in config.json.

        Raises:
            CheckpointError: a setting is missing or wrong.
            UnsupportedError: a setting changes the mathematics and is not supported.
        """
        return config

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config completed by settings that are specific to this model type; by default unchanged.

        Args:
            config: config read from the keys that all models have.
            keys: metadata of the file.
            shapes: shape of each tensor by name, in torch order.
        """
        return config

    def as_gguf(self, config: ModelConfig) -> ModelConfig:
        """Return the config as a reader of a packed file gets it; by default the same."""
        return config

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the extra metadata of a packed GGUF file, by key without the architecture's prefix."""
        return {}

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the settings that only this family has, under the names of transformers' config class."""
        return {}

    def hf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return all possible sources of a buffer in safetensors, the usual one first; the first stored one is used.

        A family overrides this if some of its files pack or fuse tensors and others do not.
        """
        return (self.hf_source(name, config),)

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return all possible sources of a buffer in GGUF files, as `hf_sources` does for safetensors."""
        return (self.gguf_source(name, config),)


def split_layer(name: str) -> tuple[int | None, str]:
    """Split a decoder name into layer index and rest: "layers.3.mlp.up_proj.bias" to (3, "mlp.up_proj.bias").

    The index is None for a name outside the layers.
    """
    if not name.startswith("layers."):
        return None, name
    _, index, leaf = name.split(".", 2)
    return int(index), leaf


def gguf_name(name: str, leaves: Mapping[str, str]) -> str:
    """Return the name of a decoder's buffer in llama.cpp.

    Args:
        name: name in the decoder, such as "layers.3.mlp.up_proj.weight".
        leaves: names of modules in llama.cpp, by the decoder's, such as "mlp.up_proj" to "ffn_up".
    """
    index, leaf = split_layer(name)
    module, _, parameter = leaf.rpartition(".")
    stored = f"{leaves[module]}.{parameter}"
    return stored if index is None else f"blk.{index}.{stored}"
