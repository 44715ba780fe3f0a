"""A prepared decoder of which a rank keeps its share of the layers (graphcore/parallel)."""

from dataclasses import replace

from graphcore.arch.weight_map import weight_shapes
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.errors import ConfigError
from graphcore.parallel.deal import Share


def dealt(parts: PreparedDecoder, share: Share) -> PreparedDecoder:
    """Return the part of a prepared decoder that a rank has: its layers and, on rank 0, embedding and head."""
    parts.decoder.keep(share.layers, share.has_ends)
    loader = parts.loader.kept(weight_shapes(parts.decoder))
    draft = None if parts.draft is None else parts.draft.kept(share.layers, share.has_ends)
    return replace(parts, runtime=replace(parts.runtime, share=share), loader=loader, draft=draft)


def check_dealable(parts: PreparedDecoder) -> None:
    """Check that a model's layers can be dealt to ranks on this device.

    Raises:
        ConfigError: they cannot be.
    """
    if parts.runtime.device.type == "cuda" and parts.decoder.spec.per_layer is not None:
        raise ConfigError(
            "parallel=ring: per-layer features (Gemma 4) are not sent between GPUs yet; set device=cpu, or parallel=off"
        )
