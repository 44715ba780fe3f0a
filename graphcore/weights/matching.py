"""Matching of stored tensors to a decoder's weights, done and checked before any tensor is read."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from math import prod

from graphcore.arch.architecture import Architecture, TensorSource
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import InverseScale, PickParts, PickRows, ScaleOnly, WithoutScale
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.quantized.layout import ORDER, ORDER_ADVICE
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.weights.extra_tensors import listed, refuse_unexpected

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
FEATURES = "embed_tokens.per_layer.table.weight"
WEIGHT = ".weight"
SCALE = "_scale"  # suffix that turns the name of a ternary weight into that of its scale

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
        CheckpointError: a weight has no stored tensor, or the files disagree about it; a stored tensor of a layer or
            of the model has no weight; or a shape differs.
    """
    if checkpoint.layout == "gguf":
        architecture.check_gguf(checkpoint, config, stored_layers)
    namer = _namer(architecture, config, checkpoint)
    sources = {name: _scaled_source(name, namer, config, shapes) for name in shapes}
    if HEAD in sources and sources[HEAD].name not in checkpoint.tensors and config.tie_word_embeddings:
        sources[HEAD] = sources[EMBEDDING]
    checkpoint.check_needed(sorted({source.name for source in sources.values()}))
    missing = sorted({source.name for source in sources.values()} - checkpoint.tensors.keys())
    if missing:
        raise CheckpointError(
            f"{checkpoint.source}: Missing required tensor: {listed(missing)}; the file is incomplete or is no "
            f"{config.model_type} model"
        )
    refuse_unexpected(architecture, config, checkpoint, {source.name for source in sources.values()}, stored_layers)
    for name, source in sources.items():
        _check_shape(checkpoint, source, name, shapes[name])
    _check_parts(checkpoint, sources, shapes)
    return sources


def ordered_inputs(
    architecture: Architecture, config: ModelConfig, checkpoint: Checkpoint, names: Iterable[str]
) -> tuple[str, ...]:
    """Return the modules whose weights have an input order in the checkpoint, such as "layers.0.mlp.up_proj".

    Args:
        names: names of the decoder's weights.

    Raises:
        UnsupportedError: a fold of such a weight may move columns.
    """
    if not any(name.endswith(ORDER) for name in checkpoint.tensors):
        return ()
    namer, found = _namer(architecture, config, checkpoint), []
    for stem in (name.removesuffix(WEIGHT) for name in names if name.endswith(WEIGHT)):
        order = _order_source(stem, namer)
        if order.name not in checkpoint.tensors:
            continue
        if not all(fold.works_packed for fold in namer(stem + WEIGHT).folds):
            raise UnsupportedError(
                f"{checkpoint.source}: {quoted(order.name)}: the columns of {quoted(stem)} have an order (act-order) "
                f"and are changed in another way, too; {ORDER_ADVICE}"
            )
        found.append(stem)
    return tuple(found)


def _order_source(stem: str, namer: Namer) -> TensorSource:
    """Return the source of a module's input order, which all rows of the stored weight share."""
    return TensorSource(namer(stem + WEIGHT).name.removesuffix(WEIGHT) + ORDER)


def _namer(architecture: Architecture, config: ModelConfig, checkpoint: Checkpoint) -> Namer:
    """Return the function from a weight's name to its source in this checkpoint's layout."""
    match checkpoint.layout:
        case "decoder":
            return lambda name: TensorSource(name)
        case "gguf":
            return lambda name: _stored_one(architecture.gguf_sources(name, config), checkpoint)
    stored = checkpoint.tensors
    embedding = architecture.hf_source(EMBEDDING, config).name
    wrappers = ("", *_shared_prefixes(stored))
    found = ((one, one + prefix) for one in wrappers for prefix in architecture.hf_prefixes)
    otherwise = ("", architecture.hf_prefixes[0])
    wrapper, prefix = next((pair for pair in found if pair[1] + embedding in stored), otherwise)

    def in_full(source: TensorSource, name: str) -> TensorSource:
        candidates = (prefix + source.name, wrapper + source.name, "language_model." + source.name)
        return replace(source, name=next((full for full in candidates if full in stored), candidates[name == HEAD]))

    def of_hf(name: str) -> TensorSource:
        return _stored_one([in_full(source, name) for source in architecture.hf_sources(name, config)], checkpoint)

    return of_hf


def _shared_prefixes(names: Iterable[str]) -> list[str]:
    """Return the prefixes that all names share, the shortest first: "policy.", "policy.model."."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)  # the last part is a tensor's own
    shared = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    return [".".join([*shared[:count], ""]) for count in range(1, len(shared) + 1)]


def _stored_one(sources: Sequence[TensorSource], checkpoint: Checkpoint) -> TensorSource:
    """Return the first source that the checkpoint holds, or the first of all if it holds none."""
    return next((source for source in sources if source.name in checkpoint.tensors), sources[0])


def _scaled_source(name: str, namer: Namer, config: ModelConfig, names: Container[str]) -> TensorSource:
    """Return the source of a weight. A ternary weight and its scale come from the same stored tensor."""
    if name.endswith(ORDER):
        return _order_source(name.removesuffix(ORDER), namer)
    if name.endswith(SCALE):
        fold = InverseScale() if config.ternary == "divided" else ScaleOnly()
        return replace(namer(name.removesuffix(SCALE)), folds=(fold,))
    source = namer(name)
    return replace(source, folds=(*source.folds, WithoutScale())) if name + SCALE in names else source


def _check_shape(checkpoint: Checkpoint, source: TensorSource, name: str, expected: tuple[int, ...]) -> None:
    """Raise a CheckpointError unless a stored tensor has the expected shape once its folds are applied."""
    stored = checkpoint.tensors[source.name].shape
    found: tuple[int, ...] | None = None
    try:
        shape = tuple(stored)
        for fold in source.folds:
            shape = fold.shape_of(shape)
        found = shape
    except (RuntimeError, ValueError, IndexError):
        pass
    if found != expected:
        became = "" if found in (None, stored) else f", which becomes {list(found or ())}"
        raise CheckpointError(
            f"{checkpoint.source}: Shape mismatch for {source.name}: expected {list(expected)} for {name}, "
            f"got {list(stored)}{became}; config and weights are of different models"
        )


def _check_parts(
    checkpoint: Checkpoint, sources: Mapping[str, TensorSource], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a fused tensor of which rows are left over: with another number of heads, q, k and v begin elsewhere."""
    parts: dict[str, list[str]] = defaultdict(list)
    for name, source in sources.items():
        if any(isinstance(fold, PickRows | PickParts) for fold in source.folds):
            parts[source.name].append(name)
    for stored, names in parts.items():
        shape, used = checkpoint.tensors[stored].shape, sum(prod(shapes[name]) for name in names)
        if used != prod(shape):
            raise CheckpointError(
                f"{checkpoint.source}: Shape mismatch for {stored}: {listed(names)} take {used} numbers of it, and "
                f"{list(shape)} has {prod(shape)}; config and weights are of different models"
            )
