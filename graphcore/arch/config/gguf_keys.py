"""Access to the metadata of a GGUF file under its architecture's prefix; sizes may be arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.typed_fields import Fields
from graphcore.errors import CheckpointError, UnsupportedError

WINDOW = "attention.sliding_window"  # key of the window of sliding layers, in tokens
WINDOW_PATTERN = "attention.sliding_window_pattern"  # key of the layers that slide, or of the distance of the others
KV_HEADS = "attention.head_count_kv"  # key of the number of kv heads; 0 in a layer without attention
YARN_ATTENTION = "rope.scaling.yarn_attn_factor"  # key of YaRN's factor of cosines and sines; 0 and 1 are unset
NO_WINDOW = (None, 0, -1, 2**32 - 1)  # values of WINDOW for no window; the last is -1 as an unsigned number


def as_float32(value: float) -> float:
    """Return a number rounded to float32, as GGUF metadata stores it."""
    return float(np.float32(value))


@dataclass(frozen=True)
class GGUFKeys:
    """The metadata of one GGUF file, read under its architecture's prefix.

    Attributes:
        fields: all metadata of the file.
        architecture: value of general.architecture, the prefix of the model's own keys.
        defaults: defaults of the corresponding Hugging Face model type.
    """

    fields: Fields
    architecture: str
    defaults: ClassDefaults

    def name(self, key: str) -> str:
        """Return the full name of a key of the architecture."""
        return f"{self.architecture}.{key}"

    def size(self, key: str) -> int | None:
        """Return a size; of an array with one value per layer, the value that all layers share. None if absent.

        Of a key that may differ by layer (`ClassDefaults.sizes_by_layer`), the first layer's value is returned; of kv
        heads that of the first layer that attends.

        Raises:
            CheckpointError: the value is not a positive integer, or an array has another length than block_count.
            UnsupportedError: the value differs by layer.
        """
        name = self.name(key)
        value = self.fields.raw.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) == 0 or key == "block_count":
            return self.fields.size(name)
        if len(value) != self.size("block_count"):
            raise self.fields.wrong(name, value, f"a list of block_count ({self.size('block_count')}) values")
        if key not in self.defaults.sizes_by_layer and any(member != value[0] for member in value):
            raise UnsupportedError(f"{self.fields.source}: {name} differs by layer, which is not supported")
        skips = key == KV_HEADS and key in self.defaults.sizes_by_layer
        first = next((member for member in value if member != 0), None) if skips else value[0]
        return Fields({name: first}, self.fields.source).size(name)

    def sizes(self, key: str, num_layers: int) -> tuple[int, ...]:
        """Return the sizes of all layers: the members of an array, or as often the one number.

        Raises:
            CheckpointError: a value is not a positive integer, or an array has another number of values.
        """
        name = self.name(key)
        value = self.fields.raw.get(name)
        members = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * num_layers
        if len(members) != num_layers:
            raise self.fields.wrong(name, value, f"a list of {num_layers} values")
        found = [Fields({name: member}, self.fields.source).size(name) for member in members]
        if None in found:
            raise self.fields.wrong(name, value, "a positive integer for each layer")
        return tuple(size for size in found if size is not None)

    def required_size(self, key: str) -> int:
        """Return a size, as `size` does, whose presence `check_required` has checked."""
        value = self.size(key)
        assert value is not None, f"{key} was not checked to be there"
        return value

    def check_required(self, keys: Sequence[str]) -> None:
        """Check that all keys are present.

        Raises:
            CheckpointError: some are missing; the message names all of them.
        """
        missing = [self.name(key) for key in keys if self.fields.raw.get(self.name(key)) is None]
        if missing:
            raise CheckpointError(
                f"{self.fields.source}: lacks {', '.join(missing)}; fetch the file again or convert it anew"
            )
