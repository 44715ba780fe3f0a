"""Matching of stored tensors to a decoder's weights, done and checked before any tensor is read."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from graphcore.arch.architecture import Architecture, TensorSource
from graphcore.arch.checkpoint_config import ROPE_FREQS
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import InverseScale, ScaleOnly, WithoutScale
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.errors import CheckpointError

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
FEATURES = "embed_tokens.per_layer.table.weight"
SCALE = "_scale"  # suffix that turns the name of a ternary weight into that of its scale
GGUF_IGNORED = (ROPE_FREQS,)  # read with the config, not as a weight
SHOWN = 4  # number of tensor names in one message

Namer = Callable[[str], TensorSource]


def match_weights(
    architecture: Architecture,
    config: ModelConfig,
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    stored_layers: int,
) -> dict[str, TensorSource]:
    """Return the stored tensor and folds of each weight, by name. A tied head that is not stored gets the embedding's.

    Args:
        shapes: shape of each of the decoder's weights, by name.
        stored_layers: number of layers in the checkpoint; `config` may ask for only the first ones.

    Raises:
        CheckpointError: a weight has no stored tensor, a stored tensor of a layer or of the model has no weight, or a
            shape differs.
    """
    if checkpoint.layout == "gguf":
        architecture.check_gguf(checkpoint, config, stored_layers)
    namer = _namer(architecture, config, checkpoint)
    sources = {name: _scaled_source(name, namer, config, shapes) for name in shapes}
    if HEAD in sources and sources[HEAD].name not in checkpoint.tensors and config.tie_word_embeddings:
        sources[HEAD] = sources[EMBEDDING]
    missing = sorted({source.name for source in sources.values()} - checkpoint.tensors.keys())
    if missing:
        raise CheckpointError(
            f"{checkpoint.source}: Missing required tensor: {_listed(missing)}; the file is incomplete or is no "
            f"{config.model_type} model"
        )
    left_out = range(config.num_hidden_layers, stored_layers + config.num_predicting_layers)
    _refuse_unexpected(architecture, config, checkpoint, {source.name for source in sources.values()}, left_out)
    for name, source in sources.items():
        _check_shape(checkpoint, source, name, shapes[name])
    return sources


def _namer(architecture: Architecture, config: ModelConfig, checkpoint: Checkpoint) -> Namer:
    """Return the function from a weight's name to its source in this checkpoint's layout."""
    match checkpoint.layout:
        case "decoder":
            return lambda name: TensorSource(name)
        case "gguf":
            return lambda name: _stored_one(architecture.gguf_sources(name, config), checkpoint)
    stored = checkpoint.tensors
    embedding = architecture.hf_source(EMBEDDING, config).name
    prefixes = [prefix for prefix in architecture.hf_prefixes if prefix + embedding in stored]
    prefix = (prefixes or architecture.hf_prefixes)[0]

    def in_full(source: TensorSource, name: str) -> TensorSource:
        candidates = (prefix + source.name, source.name, "language_model." + source.name)
        return replace(source, name=next((full for full in candidates if full in stored), candidates[name == HEAD]))

    def of_hf(name: str) -> TensorSource:
        return _stored_one([in_full(source, name) for source in architecture.hf_sources(name, config)], checkpoint)

    return of_hf


def _stored_one(sources: Sequence[TensorSource], checkpoint: Checkpoint) -> TensorSource:
    """Return the first source that the checkpoint holds, or the first of all if it holds none."""
    return next((source for source in sources if source.name in checkpoint.tensors), sources[0])


def _scaled_source(name: str, namer: Namer, config: ModelConfig, names: Container[str]) -> TensorSource:
    """Return the source of a weight. A ternary weight and its scale come from the same stored tensor."""
    if name.endswith(SCALE):
        fold = InverseScale() if config.ternary == "divided" else ScaleOnly()
        return replace(namer(name.removesuffix(SCALE)), folds=(fold,))
    source = namer(name)
    return replace(source, folds=(*source.folds, WithoutScale())) if name + SCALE in names else source


def _refuse_unexpected(
    architecture: Architecture, config: ModelConfig, checkpoint: Checkpoint, used: Iterable[str], left_out: range
) -> None:
    """Refuse stored tensors that no weight uses: without them (a norm, a bias, an adapter) results would be wrong."""
    ignored = (*architecture.unused, *GGUF_IGNORED)
    unused = [
        name
        for name in checkpoint.tensors.keys() - set(used)
        if not any(part in name for part in ignored)
        and not architecture.ignores(name, config)
        and not _is_tied_head(name, config)
    ]
    unexpected = sorted(name for name in unused if not _is_of_layers(name, left_out))
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.source}: unexpected tensor {_listed(unexpected)}, which a {config.model_type} model does not "
            "have; the file is of another architecture or has adapters that must be merged first"
        )


def note_on_unused(
    architecture: Architecture, config: ModelConfig, checkpoint: Checkpoint, stored_layers: int
) -> str | None:
    """Return a note about parts of a checkpoint that text generation leaves out, or None if there are none."""
    found = dict.fromkeys(architecture.unused.values(), 0)
    predicting = range(stored_layers, stored_layers + config.num_predicting_layers)
    for name in checkpoint.tensors:
        for substring, part in architecture.unused.items():
            found[part] += substring in name
        if _is_of_layers(name, predicting):
            found["multi-token prediction"] += 1
    parts = [f"{part} ({count} tensor{'s' * (count > 1)})" for part, count in found.items() if count]
    return f"left out of the checkpoint: {' and '.join(parts)}" if parts else None


def _is_tied_head(name: str, config: ModelConfig) -> bool:
    return config.tie_word_embeddings and name.endswith(HEAD)


def _is_of_layers(name: str, layers: range) -> bool:
    """Return whether the first number in a stored name is the index of one of the layers."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return bool(numbers) and numbers[0] in layers


def _check_shape(checkpoint: Checkpoint, source: TensorSource, name: str, expected: tuple[int, ...]) -> None:
    """Refuse a source whose shape after folding is not the expected one; folds a meta tensor to find out."""
    stored = checkpoint.tensors[source.name].shape
    folded = torch.empty(stored, device="meta", dtype=torch.float32)
    try:
        for fold in source.folds:
            folded = fold.apply(folded)
        found = tuple(folded.shape)
    except (RuntimeError, ValueError):
        found = None
    if found != expected:
        became = "" if found in (None, stored) else f", which becomes {list(found or ())}"
        raise CheckpointError(
            f"{checkpoint.source}: Shape mismatch for {source.name}: expected {list(expected)} for {name}, "
            f"got {list(stored)}{became}; config and weights are of different models"
        )


def _listed(names: list[str]) -> str:
    """Return the first few names, quoted, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + more
