"""What an architecture is: a spec made from a config, and where each weight comes from.

    ModelConfig --spec()--> ModelSpec --nn--> Decoder with named buffers, such as layers.3.self_attn.q_proj.weight
    each name --hf_source() or gguf_source()--> the stored tensor and the folds that bring it to the decoder's form

The decoder's names are Hugging Face's without "model.", so most of a weight map is the identity.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from graphcore.arch.folds import Fold
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.nn.spec import ModelSpec


@dataclass(frozen=True)
class TensorSource:
    """A stored tensor and what is done to it."""

    name: str
    folds: tuple[Fold, ...] = ()


class Architecture(ABC):
    """A family of models that share names and mathematics.

    Attributes:
        model_types: what config.json calls them.
        hf_prefixes: what may stand before the decoder's names in safetensors, the likeliest first.
        ignored: parts of names of stored tensors that text generation does not use.
    """

    model_types: tuple[str, ...]
    hf_prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)

    @abstractmethod
    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return what the model computes."""

    @abstractmethod
    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the source of the decoder's buffer `name` in safetensors, its prefix left out."""

    @abstractmethod
    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the source of the decoder's buffer `name` in a GGUF file."""

    def check_gguf(self, checkpoint: Checkpoint, config: ModelConfig, num_layers: int) -> None:  # noqa: B027  # optional
        """Return if a GGUF file passes the family's own check; by default there is none beyond the match of names.

        Args:
            num_layers: that the file says it has; `config` may ask for the first of them only.

        Raises:
            CheckpointError: it does not.
        """

    def hf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return every form in which safetensors hold the buffer, the usual one first; the first that is stored counts.

        A family whose files pack or fuse some tensors, or do not, overrides this.
        """
        return (self.hf_source(name, config),)

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return every form in which GGUF files hold the buffer, as `hf_sources` does."""
        return (self.gguf_source(name, config),)


def split_layer(name: str) -> tuple[int | None, str]:
    """Return the layer index and the rest of a decoder name: "layers.3.mlp.up_proj.bias" to (3, "mlp.up_proj.bias").

    A name outside the layers has no index.
    """
    if not name.startswith("layers."):
        return None, name
    _, index, leaf = name.split(".", 2)
    return int(index), leaf


def gguf_name(name: str, leaves: Mapping[str, str]) -> str:
    """Return llama.cpp's name of a decoder buffer.

    Args:
        name: such as "layers.3.mlp.up_proj.weight".
        leaves: module name to llama.cpp's, such as "mlp.up_proj" to "ffn_up".
    """
    index, leaf = split_layer(name)
    module, _, parameter = leaf.rpartition(".")
    stored = f"{leaves[module]}.{parameter}"
    return stored if index is None else f"blk.{index}.{stored}"
