"""One new token's attention over a cache that holds its key and value already: split-KV decode, as one kernel.

Legend: B batch, H heads, K kv heads, E head dim, S cache slots.
"""

import torch
from torch import Tensor

torch.library.define(
    "graphcore::attend_written",
    "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor starts, Tensor counts, int window, float scale,"
    " Tensor? sinks=None, Tensor(a!)? arrivals=None) -> Tensor",
)


def attend_written(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Attend one new token of each sequence, whose key and value are in the cache.

    Args:
        query: [B, 1, H, E] compute dtype; any strides but the last's, which is 1.
        k_cache, v_cache: [B, K, S, E] cache dtype; position p in slot p mod S, positions 0 .. starts are there.
        starts: [B] int64, the new token's position.
        counts: [B] int64, 1, or 0 of a row without a token; that row's answer is zeros.
        window: the last `window` keys are visible, the new one included; 0 is all.
        scale: multiplies q . k.
        sinks: [H] float32, as in `attend`.
        arrivals: [B * K or more] int32 zeros, and zeros again afterwards; all layers of a stream may share one.
            Without it each call makes its own, which is one more fill on the stream.

    Returns:
        [B, 1, H, E] compute dtype, contiguous.
    """
    op = torch.ops.graphcore.attend_written.default
    return op(query, k_cache, v_cache, starts, counts, window, scale, sinks, arrivals)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::attend_written")
def _fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def launch_attend_written(*_: object) -> Tensor:
    """Implement `attend_written`."""
    raise NotImplementedError


torch.library.impl("graphcore::attend_written", "CompositeExplicitAutograd", launch_attend_written)
