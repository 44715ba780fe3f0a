"""A prepared decoder of which a rank keeps its share of the layers (graphcore/parallel)."""

from dataclasses import replace

from graphcore.arch.weight_map import weight_shapes
from graphcore.engine.loading.open_model import Model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.errors import ConfigError
from graphcore.parallel.deal import Share


def dealt(parts: PreparedDecoder, share: Share) -> PreparedDecoder:
    """Return the part of a prepared decoder that a rank has: its layers and, on rank 0, embedding and head."""
    parts.decoder.keep(share.layers, share.has_ends)
    loader = parts.loader.kept(weight_shapes(parts.decoder))
    draft = None if parts.draft is None else parts.draft.kept(share.layers, share.has_ends)
    return replace(parts, runtime=replace(parts.runtime, share=share), loader=loader, draft=draft)


def check_dealable(model: Model) -> None:
    """Check that a model's layers can be dealt to ranks.

    Raises:
        ConfigError: they cannot be.
    """
    reason = _obstacle(model)
    if reason:
        raise ConfigError(f"parallel=ring: {reason}")


def _obstacle(model: Model) -> str:
    """Return why a model's layers cannot be split across ranks; empty if they can."""
    spec, family = model.spec, model.config.model_type
    if spec.per_layer is not None:
        return f"{family} has per-layer features, which no rank sends to another yet; use parallel=off"
    if spec.cache_layers != tuple(range(len(spec.blocks))):
        return f"layers of {family} read the caches of others, which other ranks may have; use parallel=off"
    return ""
