"""Which stored tensor is which weight of a transformers skeleton, settled and checked before any byte is read.

Names are compared after the renamings that transformers itself does when it loads (a base model's prefix too much or
too little, names that a class once had). What transformers would build from several stored tensors is refused.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.arch.transformers_fallback import Skeleton
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHOWN = 4  # names of tensors in one message
IGNORED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"\.attn\.(masked_)?bias$")  # computed, stored by old files


def match_skeleton(skeleton: Skeleton, checkpoint: Checkpoint) -> dict[str, TensorSource]:
    """Return the stored tensor of each weight; a tied weight without one of its own has that of its partner.

    Raises:
        CheckpointError: a weight has no stored tensor, a stored tensor no weight, or a shape or type differs.
        UnsupportedError: transformers would build a weight from several stored tensors.
    """
    weights = skeleton.weights()
    stored = renamed(skeleton.model, checkpoint, weights)
    sources = {}
    for name in weights:
        known = [alias for alias in (name, *skeleton.aliases.get(name, ())) if alias in stored]
        if known:
            sources[name] = TensorSource(stored[known[0]])
    kind = f"{type(skeleton.model).__name__} ({skeleton.model.config.model_type})"
    missing = sorted(weights.keys() - sources.keys())
    if missing:
        raise CheckpointError(
            f"{checkpoint.source}: Missing required tensor: {listed(missing)}; the files are incomplete or are of no "
            f"{kind}"
        )
    ignored = [*IGNORED, *(skeleton.model._keys_to_ignore_on_load_unexpected or ())]
    unused = sorted(name for name in stored.keys() - weights.keys() if not any(re.search(one, name) for one in ignored))
    if unused:
        raise CheckpointError(
            f"{checkpoint.source}: unexpected tensor {listed(unused)}, which a {kind} does not have; the files are of "
            "another architecture or have adapters that must be merged first"
        )
    for name, source in sources.items():
        _check(checkpoint, source.name, name, weights[name])
    return sources


def renamed(model: "PreTrainedModel", checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the model's names of the stored tensors, each with the stored one.

    Raises:
        UnsupportedError: transformers would do more than rename one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    names: dict[str, str] = {}
    rebuilt = []
    for stored in checkpoint.tensors:
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, dict(weights))
        if pattern is not None and stored not in weights:
            rebuilt.append(stored)
        names[stored if stored in weights else name] = stored
    if rebuilt:
        raise UnsupportedError(
            f"{checkpoint.source}: transformers builds weights of {type(model).__name__} from several stored tensors "
            f"({listed(rebuilt)}), and model.fallback=transformers only reads them one to one; load the model with "
            "transformers, and save it with save_original_format=False"
        )
    return names


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


def listed(names: Iterable[str]) -> str:
    """Return the first few names, quoted, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + more
