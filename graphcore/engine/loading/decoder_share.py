"""The part of a prepared decoder that is one rank's share of the layers (graphcore/parallel)."""

from dataclasses import replace

from graphcore.arch.weight_map import weight_shapes
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.errors import ConfigError
from graphcore.parallel.share import Share


def with_share(parts: PreparedDecoder, share: Share) -> PreparedDecoder:
    """Return the part of a prepared decoder that a rank has: its layers and, on rank 0, embedding and head."""
    parts.decoder.keep(share.layers, share.has_ends)
    loader = parts.loader.kept(weight_shapes(parts.decoder))
    draft = None if parts.draft is None else parts.draft.kept(share.layers, share.has_ends)
    return replace(parts, runtime=replace(parts.runtime, share=share), loader=loader, draft=draft)


def check_partitionable(parts: PreparedDecoder) -> None:
    """Check that the layers of a model can be on several ranks with this device.

    Raises:
        ConfigError: they cannot be.
    """
    if parts.runtime.device.type == "cuda" and parts.decoder.spec.per_layer is not None:
        raise ConfigError(
            "parallel=ring: per-layer features (Gemma 4) are not sent between GPUs yet; set device=cpu, or parallel=off"
        )
