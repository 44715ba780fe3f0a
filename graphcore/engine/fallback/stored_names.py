"""The stored tensor of each weight of a transformers skeleton, found and checked before any byte is read.

Names are compared after the renamings that transformers itself does when it loads (a base model's prefix added or
removed, older names of a class). Experts that are stored one by one are stacked. Any other conversion of stored tensors
that transformers would do is refused.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.stacked_checkpoint import Stack, StackedCheckpoint
from graphcore.engine.fallback.skeleton import Skeleton
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.quant.format_choice import HEAD
from graphcore.weights.extra_tensors import cause_of_unexpected, harmless_tensors, layer_of, listed, notes_on_files
from graphcore.weights.loader import Loader

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

IGNORED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"\.attn\.(masked_)?bias$")  # computed, stored by old files


def match_skeleton(skeleton: Skeleton, checkpoint: Checkpoint) -> Loader:
    """Return the loader of a skeleton's weights; a tied weight without a stored tensor reads that of its partner.

    Raises:
        CheckpointError: a weight has no stored tensor, a stored tensor no weight, or a shape or type differs.
        UnsupportedError: transformers would build a weight by more than renaming and stacking.
    """
    weights = skeleton.weights()
    stored, stacks = renamed(skeleton.model, checkpoint, weights)
    checkpoint = StackedCheckpoint(checkpoint, stacks) if stacks else checkpoint
    sources = {}
    for name in weights:
        known = [alias for alias in (name, *skeleton.aliases.get(name, ())) if alias in stored]
        if known:
            sources[name] = TensorSource(stored[known[0]])
    kind = f"{type(skeleton.model).__name__} ({skeleton.model.config.model_type})"
    used = {source.name for source in sources.values()}
    checkpoint.check_needed(sorted(used))
    missing = sorted(weights.keys() - sources.keys())
    if missing:
        raise CheckpointError(
            f"{checkpoint.source}: Missing required tensor: {listed(missing)}; the files are incomplete or are of no "
            f"{kind}"
        )
    ignored = [*IGNORED, *(skeleton.model._keys_to_ignore_on_load_unexpected or ())]
    unused = sorted(
        stored[name] for name in stored.keys() - weights.keys() if not any(re.search(one, name) for one in ignored)
    )
    harmless = harmless_tensors(checkpoint, used, unused)
    unused = [name for name in unused if name not in harmless]
    if unused:
        raise CheckpointError(
            f"{checkpoint.source}: unexpected tensor {listed(unused)}, which a {kind} does not have; "
            f"{cause_of_unexpected(unused, 1 + max(map(layer_of, weights)), checkpoint.layout)}"
        )
    for name, source in sources.items():
        _check(checkpoint, source.name, name, weights[name])
    return Loader(checkpoint, sources)


def notes_on_left_out(loader: Loader) -> tuple[str, ...]:
    """Return notes about tensors of the checkpoint that no weight reads."""
    used = {source.name for source in loader.sources.values()}
    extra = sorted(name for name in loader.checkpoint.tensors.keys() - used if not name.endswith(HEAD))
    harmless = harmless_tensors(loader.checkpoint, used, extra)
    return notes_on_files(loader.checkpoint, [listed(harmless)] if harmless else [])


def renamed(
    model: "PreTrainedModel", checkpoint: Checkpoint, weights: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, Stack]]:
    """Return the stored name of each of the model's tensors, and the stacks of those that are made of several.

    A stack has the model's name as its stored name.

    Raises:
        UnsupportedError: transformers would do more than rename and stack them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names: dict[str, str] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for stored in sorted(checkpoint.tensors, key=natural):
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, dict(weights))
        if stored in weights or pattern is None:
            names[stored if stored in weights else name] = stored
            continue
        if not only_stacks(by_pattern[pattern]):
            raise UnsupportedError(
                f"{checkpoint.source}: transformers computes '{name}' of {type(model).__name__} from stored tensors "
                f"('{stored}' is one), and model.fallback=transformers only renames and stacks them; load the model "
                "with transformers, and save it with save_original_format=False"
            )
        rule = parts.setdefault(name, {one: [] for one in by_pattern[pattern].source_patterns})
        rule[pattern].append(stored)
    stacks = {name: tuple(tuple(part) for part in found.values()) for name, found in parts.items()}
    return names | {name: name for name in stacks}, stacks


def only_stacks(rule: "WeightConverter") -> bool:
    """Return whether a rule of transformers stacks experts along the first axis, and parts of them along the rows."""
    kinds = [(type(operation).__name__, vars(operation).get("dim")) for operation in rule.operations]
    return kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the values of their numbers: expert 2 before expert 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _check(checkpoint: Checkpoint, source: str, name: str, weight: Tensor) -> None:
    info = checkpoint.tensors[source]
    if info.shape != tuple(weight.shape):
        raise CheckpointError(
            f"{checkpoint.source}: Shape mismatch for {source}: expected {list(weight.shape)} for {name}, got "
            f"{list(info.shape)}; config and weights are of different models"
        )
    if not (DENSE_DTYPES.get(info.encoding, torch.uint8).is_floating_point and weight.is_floating_point()):
        raise UnsupportedError(
            f"{checkpoint.source}: tensor '{source}' holds {info.encoding}, and model.fallback=transformers reads "
            "dense floating-point weights only"
        )
