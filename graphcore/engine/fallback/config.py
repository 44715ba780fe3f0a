"""The sizes and token ids that graphcore needs of any model, read from a transformers config of any class."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from graphcore.arch.config.model_config import AttentionConfig, ModelConfig
from graphcore.arch.config.ternary_scaling import note_on_full_weights
from graphcore.arch.config.typed_fields import Fields
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.generation_config import FILE_NAME, read_generation_config
from graphcore.checkpoint.json_object import read_json_object
from graphcore.checkpoint.token_ids import SPECIAL_IDS, read_special_ids
from graphcore.errors import CheckpointError, GraphcoreError, UnsupportedError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
LENGTH_DEPENDENT = ("dynamic", "longrope")
CONFIG_ERRORS = (  # errors of transformers' classes over settings that mean nothing; it checks few of them
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
UNBOUNDED_CONTEXT = 1 << 20  # tokens, where there is no table of positions and the config states no length (ALiBi)


@contextmanager
def torchs_own_defaults() -> Iterator[None]:
    """Let tensors that transformers makes without a dtype or a device be float32 and on the CPU.

    The program's own defaults may differ. The default device is the calling thread's, but the default dtype is that of
    all threads: it is set only where it differs.
    """
    dtype = torch.get_default_dtype()
    if dtype is torch.float32 and torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


@contextmanager
def refusing(source: str, model_type: object) -> Iterator[None]:
    """Raise whatever transformers' own code raises inside the block, over a config or a pass, as UnsupportedError.

    Its classes check few of their settings: a wrong type, an unknown name or a contradiction surfaces as the error of
    the statement that meets it, for some in the first pass. Errors of a device and of its memory are raised as they
    are.

    Args:
        source: file or checkpoint that the config is from, for the message.
        model_type: model type of the config, for the message.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (GraphcoreError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except (*CONFIG_ERRORS, StrictDataclassError) as error:
        raise UnsupportedError(
            f"{source}: transformers {transformers.__version__} cannot run it ({type(error).__name__}: "
            f"{one_line(error)}); model_type is {quoted(model_type)}: correct the setting, or choose a checkpoint of "
            "an architecture that is part of transformers"
        ) from error


def read_transformers_config(folder: Path) -> "PreTrainedConfig":
    """Return transformers' own reading of a folder's config.json.

    Raises:
        UnsupportedError: transformers does not know the model type, or finds the settings contradictory.
    """
    import transformers

    model_type = read_json_object(folder / "config.json").get("model_type")
    with refusing(str(folder / "config.json"), model_type):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    assert isinstance(config, transformers.PreTrainedConfig), f"AutoConfig gave {type(config).__name__}"
    return config


def model_config_of(config: "PreTrainedConfig", folder: Path) -> ModelConfig:
    """Return the sizes and token ids of a model; settings that only its class reads stay in the class's config.

    Raises:
        UnsupportedError: the config's weights are quantised, or it has no vocabulary, width or number of layers.
    """
    values = Fields(config.to_dict(), str(folder / "config.json"))
    ignored = note_on_full_weights(values)
    if values.raw.get("quantization_config") is not None and not ignored:
        raise UnsupportedError(
            f"{values.source}: the weights are quantised (quantization_config), and model.fallback=transformers reads "
            "dense ones only; choose the unquantised checkpoint"
        )
    names = config.attribute_map
    heads = _size(values, names, "num_attention_heads")
    hidden = _size(values, names, "hidden_size")
    generation, vocab_size = read_generation_config(folder), _size(values, names, "vocab_size")
    first = read_special_ids(generation.settings, SPECIAL_IDS, vocab_size)
    then = read_special_ids(values.raw, SPECIAL_IDS, vocab_size)
    starts, ends, _ = (first.ids.get(name, ()) + then.ids.get(name, ()) for name in SPECIAL_IDS)
    return ModelConfig(
        model_type=config.model_type,
        hidden_size=hidden,
        intermediate_size=values.size(names.get("intermediate_size", "intermediate_size")) or 4 * hidden,
        num_hidden_layers=_size(values, names, "num_hidden_layers"),
        vocab_size=vocab_size,
        max_position_embeddings=_longest_context(values) or UNBOUNDED_CONTEXT,
        attention=AttentionConfig(
            num_attention_heads=heads,
            num_key_value_heads=values.size("num_key_value_heads", "num_kv_heads") or heads,
            head_dim=values.size("head_dim") or hidden // heads,
        ),
        tie_word_embeddings=bool(values.flag("tie_word_embeddings")),
        bos_token_id=starts[0] if starts else None,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        dtype=values.text("dtype"),
        notes=(*generation.notes, *first.note(str(folder / FILE_NAME)), *then.note(values.source), *ignored),
    )


def _longest_context(values: Fields) -> int | None:
    """Return the longest context in tokens, extended by a rope scaling that all layers share; None if unknown."""
    stated, rope = values.size(*CONTEXT_NAMES), values.section("rope_parameters")
    if stated is None or rope.text("rope_type") in (None, "default"):
        return stated
    original = rope.positive("original_max_position_embeddings") or stated
    return max(stated, int((rope.positive("factor") or 1.0) * original))


def check_sizes(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Check sizes of a config that no checkpoint of such tensors can have, before modules are made by their number.

    Raises:
        CheckpointError: there are more layers than tensors, or no tensor has the width or the vocabulary's size.
    """
    shapes = [info.shape for info in checkpoint.tensors.values()]
    if config.num_hidden_layers > len(shapes):
        raise CheckpointError(
            f"{checkpoint.source}: config.json states {config.num_hidden_layers} layers, and the files hold "
            f"{len(shapes)} tensors; the files are incomplete or the config is of another model"
        )
    sizes = {size for shape in shapes for size in shape}
    for name, size in (("hidden_size", config.hidden_size), ("vocab_size", config.vocab_size)):
        if size not in sizes:
            raise CheckpointError(
                f"{checkpoint.source}: config.json states {name}={size}, and no tensor has that many rows or columns; "
                "the files are incomplete or the config is of another model"
            )


def why_whole(config: "PreTrainedConfig") -> str:
    """Return why a prompt must run in one pass, in a batch of prompts of its length; empty if it need not.

    Rotary frequencies may depend on a pass's longest row. Recurrent layers may restart with every pass of several
    tokens, or treat padding as tokens.
    """
    stated = config.to_dict().get("rope_parameters") or {}
    ropes = [stated, *stated.values()]
    if any(isinstance(rope, Mapping) and rope.get("rope_type") in LENGTH_DEPENDENT for rope in ropes):
        return "its rotary frequencies depend on a pass's longest row"
    kinds = set(config.layer_types or ()) if hasattr(config, "layer_types") else set()
    if kinds - ATTENTION_KINDS:
        return f"it has layers that are no attention ({', '.join(sorted(kinds - ATTENTION_KINDS))})"
    return ""


def _size(values: Fields, names: Mapping[str, str], name: str) -> int:
    """Return a size, given the names that the config's class has for it."""
    found = values.size(names.get(name, name), name)
    if found is None:
        raise UnsupportedError(
            f"{values.source}: has no {name}; model.fallback=transformers needs a language model with attention"
        )
    return found


def one_line(error: BaseException) -> str:
    """Return the beginning of an error's text on one line."""
    text = " ".join(str(error).split())
    return text[:200]
