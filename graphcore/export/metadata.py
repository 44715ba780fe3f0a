"""The metadata of a packed file: copied from a GGUF source, or made from the config and the tokenizer.

New metadata is checked before it is written: read back as from the file, it must give the same `ModelSpec`. A setting
without a GGUF key is thus refused rather than lost. An architecture's names, and its keys beyond the common ones, are
`gguf_names` and `gguf_fields` of its `Architecture`. Source: llama.cpp, gguf-py/gguf/constants.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import gguf
import torch

from graphcore.arch.architecture import Architecture
from graphcore.arch.checkpoint_config import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from graphcore.arch.config.gguf_keys import as_float32
from graphcore.arch.config.model_config import ModelConfig, RopeParameters
from graphcore.arch.config.rope_parameters import ORIGINAL, YARN_BETA_FAST, YARN_BETA_SLOW
from graphcore.arch.config_from_gguf import config_from_gguf
from graphcore.arch.registry import ARCHITECTURES, architecture_of
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.engine.loading.open_model import Model
from graphcore.engine.sampling_defaults import gguf_values
from graphcore.errors import UnsupportedError
from graphcore.export.gguf_file import Field, FieldValue, typed_field
from graphcore.nn.rope import rope_frequencies
from graphcore.nn.rope_spec import DivisorScaling, Llama3Scaling, LongScaling, ProportionalScaling, RopeSpec
from graphcore.nn.spec import ModelSpec
from graphcore.quant.format_choice import STORED
from graphcore.quant.registry import ENCODINGS
from graphcore.tokenizer.gguf_fields import gguf_fields
from graphcore.tokenizer.hf_folder import has_tokenizer, read_folder

Values = dict[str, FieldValue]

QUANTIZATION_VERSION = 2  # version of ggml's block layouts
UNTURNED = 1e30  # divisor of a pair that is not rotated, as llama.cpp's converter writes it
NOT_COPIED = ("split.", "general.architecture", "general.alignment")  # written anew

# llama.cpp's number for a file of these tensors; it is shown to people and not used for reading.
FILE_TYPES: Mapping[str, int] = MappingProxyType(
    {name: one.file_type for name, one in ENCODINGS.items() if one.file_type is not None}
)


@dataclass(frozen=True)
class Metadata:
    """The metadata of a GGUF file: general.architecture, and all other entries."""

    architecture: str
    fields: Mapping[str, Field]


def metadata_of(
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    asked: str,
    encodings: Collection[str],
    of_card: Mapping[str, Any],
) -> Metadata:
    """Return the metadata of a file with the model's tensors.

    Args:
        shapes: shapes of the file's tensors, by name.
        asked: format that matrices are packed in, or "stored".
        encodings: encodings of the file's tensors.
        of_card: sampling parameters of the model card, for a model whose files say nothing.

    Raises:
        UnsupportedError: GGUF has no metadata that describes the model.
        TokenizerError: GGUF has no metadata that describes the tokenizer.
    """
    if isinstance(model.checkpoint, GGUFCheckpoint):
        copied = _copied(model.checkpoint, model.config.num_hidden_layers, asked)
        return replace(copied, fields={**copied.fields, **_sampling_fields(model, of_card)})
    architecture = architecture_of(model.config)
    name = _packed_name(architecture)
    narrow = sorted(set(encodings) - {"f32"})
    kind = asked if asked != STORED else next(iter(narrow), "f32")
    own: Values = {"general.type": "model", "general.quantization_version": QUANTIZATION_VERSION}
    if model.path is not None:
        own["general.name"] = model.path.resolve().name
    if kind in FILE_TYPES:
        own["general.file_type"] = FILE_TYPES[kind]
    own |= {f"{name}.{key}": value for key, value in _model_values(architecture, model.config).items()}
    stored = {**own, "general.architecture": name}
    _check_says_the_same(architecture, model.config, stored, shapes, model.checkpoint.source)
    own |= _tokenizer_values(model, name)
    fields = {key: typed_field(value) for key, value in own.items()}
    if model.path is not None:
        fields |= _sampling_fields(model, of_card)
    return Metadata(name, fields)


def _sampling_fields(model: Model, of_card: Mapping[str, Any]) -> dict[str, Field]:
    return {  # whole numbers are signed here, as in gguf-py
        key: Field(value, gguf.GGUFValueType.INT32) if isinstance(value, int) else typed_field(value)
        for key, value in gguf_values(model.checkpoint, of_card).items()
    }


def _tokenizer_values(model: Model, architecture: str) -> Mapping[str, FieldValue]:
    path = model.path  # not the checkpoint's, which may be a view of the folder's: experts in stacks, packed weights
    folder = path.parent if path is not None and path.is_file() else path
    if folder is None or not has_tokenizer(folder):
        return {"tokenizer.ggml.model": "none"}
    return gguf_fields(read_folder(folder, is_as_stored=True), model.config.vocab_size, architecture)


def _copied(checkpoint: GGUFCheckpoint, num_layers: int, asked: str) -> Metadata:
    """Return the metadata of a GGUF source, with its value types."""
    copied: dict[str, Field] = {}
    for key, value in checkpoint.metadata.items():
        is_empty = isinstance(value, tuple) and not value  # gguf cannot write it, and readers do not need it
        if not key.startswith(NOT_COPIED) and not is_empty:
            kinds = [gguf.GGUFValueType(kind) for kind in checkpoint.kinds[key]]
            copied[key] = Field(value, kinds[0], kinds[1] if len(kinds) > 1 else None)
    architecture = str(checkpoint.metadata["general.architecture"])
    count = f"{architecture}.block_count"
    copied[count] = Field(num_layers, copied[count].kind)
    if asked in FILE_TYPES:
        copied["general.file_type"] = typed_field(FILE_TYPES[asked])
    elif asked != STORED:
        copied.pop("general.file_type", None)
    return Metadata(architecture, copied)


def _packed_name(architecture: Architecture) -> str:
    """Return general.architecture of a packed file.

    Raises:
        UnsupportedError: graphcore knows no GGUF name for the architecture.
    """
    if architecture.gguf_names:
        return architecture.gguf_names[0]
    known = ", ".join(sorted(name for name, one in ARCHITECTURES.items() if one.gguf_names))
    raise UnsupportedError(f"model_type {architecture.model_type} has no GGUF form; known: {known}")


def _model_values(architecture: Architecture, config: ModelConfig) -> Values:
    """Return the values of the architecture's own keys, which are given without its prefix."""
    has_layer_norm = architecture.defaults.has_layer_norm
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.attention.num_attention_heads,
        "vocab_size": config.vocab_size,
        "attention.layer_norm_epsilon" if has_layer_norm else "attention.layer_norm_rms_epsilon": config.norm_eps,
        **({} if config.rope is None else _rotary_values(config, config.rope)),
        **architecture.gguf_fields(config),
    }


def _rotary_values(config: ModelConfig, rope: RopeParameters) -> Values:
    head_dim = config.attention.head_dim
    found: Values = {
        "attention.head_count_kv": config.attention.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": rope.width or head_dim,
        "rope.freq_base": rope.theta,
    }
    if rope.scaling is not None and rope.scaling["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = str(rope.scaling["rope_type"])
        found["rope.scaling.factor"] = float(rope.scaling["factor"])
        if ORIGINAL in rope.scaling:
            found["rope.scaling.original_context_length"] = int(rope.scaling[ORIGINAL])
        for name, usual in (("beta_fast", YARN_BETA_FAST), ("beta_slow", YARN_BETA_SLOW)):
            if float(rope.scaling.get(name, usual)) != usual:
                found[f"rope.scaling.yarn_{name}"] = float(rope.scaling[name])
    return found


def rope_divisors(spec: ModelSpec) -> dict[str, tuple[float, ...]]:
    """Return the divisors of rotary frequencies by the names of GGUF's tensors, one for each pair that rotates.

    llama.cpp has no key for Llama 3's scaling and for Gemma 4's; its files hold a divisor of each frequency, and for
    longrope two. There are none without scaling, or if GGUF has a key for it.
    """
    found: dict[RopeSpec, int] = {one.rope: one.head_dim for one in spec.attentions if one.rope is not None}
    for rope, head_dim in found.items():
        match rope.scaling:
            case DivisorScaling(divisors):
                return {ROPE_FREQS: divisors}
            case LongScaling(short, long):
                return {ROPE_LONG: tuple(map(as_float32, long)), ROPE_SHORT: tuple(map(as_float32, short))}
            case Llama3Scaling():
                plain = rope_frequencies(replace(rope, scaling=None), head_dim).double()
                return {ROPE_FREQS: tuple((plain / rope_frequencies(rope, head_dim)).to(torch.float32).tolist())}
            case ProportionalScaling(share, factor):
                pairs, turning = head_dim // 2, int(share * head_dim // 2)
                divisors = (factor,) * turning + (UNTURNED,) * (pairs - turning)
                return {ROPE_FREQS: tuple(map(as_float32, divisors))}
    return {}


def _check_says_the_same(
    architecture: Architecture,
    config: ModelConfig,
    metadata: Mapping[str, FieldValue],
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
) -> None:
    """Check that the file's metadata, read back, gives the same `ModelSpec`.

    Args:
        metadata: metadata of the file, general.architecture included.
        shapes: shapes of the file's tensors, by name.
        source: the model's source, for messages.

    Raises:
        UnsupportedError: this model differs from what readers assume, and GGUF has no key for the difference.
    """
    found = rope_divisors(architecture.spec(config))
    divisors = found.get(ROPE_FREQS)
    factors = (found[ROPE_SHORT], found[ROPE_LONG]) if ROPE_LONG in found else None
    stored = {key: as_float32(value) if isinstance(value, float) else value for key, value in metadata.items()}
    read = architecture.spec(config_from_gguf(stored, shapes, divisors, source, rope_factors=factors))
    wanted = architecture.spec(
        architecture.as_gguf(_as_stored(config, divisors, is_tied="output.weight" not in shapes))
    )
    if read == wanted:
        return
    parts = [field.name for field in fields(ModelSpec) if getattr(read, field.name) != getattr(wanted, field.name)]
    raise UnsupportedError(
        f"{source}: a GGUF file of this model would be read as another one (its {', '.join(parts)} differ: GGUF has no "
        "key for them); keep the safetensors"
    )


def _as_stored(config: ModelConfig, divisors: tuple[float, ...] | None, is_tied: bool) -> ModelConfig:
    """Return the config with its floats rounded to float32, as GGUF stores them, and its rope scaling as divisors.

    The limits of the experts' activation are not changed: they are not stored, because readers know them.
    """
    changed = replace(
        config,
        norm_eps=as_float32(config.norm_eps),
        rope=None if config.rope is None else _stored_rope(config.rope, divisors),
        tie_word_embeddings=is_tied,
    )
    scalar = config.attention.query_pre_attn_scalar
    if scalar is None:
        return changed
    return replace(changed, attention=replace(config.attention, query_pre_attn_scalar=as_float32(scalar)))


def _stored_rope(rope: RopeParameters, divisors: tuple[float, ...] | None) -> RopeParameters:
    local = None if rope.local_theta is None else as_float32(rope.local_theta)
    changed = replace(rope, theta=as_float32(rope.theta), local_theta=local)
    if divisors is not None:
        return replace(changed, scaling=None, freq_divisors=divisors)
    if rope.scaling is None:
        return changed
    key = "attention_factor" if rope.short_factors is not None else "factor"
    scaling = {**rope.scaling, key: as_float32(float(rope.scaling[key]))}
    lists = (None if one is None else tuple(map(as_float32, one)) for one in (rope.short_factors, rope.long_factors))
    short, long = lists
    return replace(changed, scaling=scaling, short_factors=short, long_factors=long)
