"""`graphcore::attend` on a GPU; kernels/attend.py says what it computes.

One token is written, then attended by split-KV decode. A chunk is attended before it is written, because in a ring it
may take the place of keys that it sees. Both launches are on one stream, in this order; nothing is read back.
"""

import torch
from torch import Tensor

from graphcore.kernels.gpu.cache_write import launch_write_cache
from graphcore.kernels.gpu.decode_attend import launch_attend_written
from graphcore.kernels.gpu.prefill_attend import launch_attend_chunk


def launch_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    _library: str = "",
    cap: float = 0.0,
) -> Tensor:
    """Implement `attend`."""
    new, caches, spans = (key, value), (k_cache, v_cache), (starts, counts)
    if query.shape[1] == 1:
        launch_write_cache(*new, *caches, *spans)
        return launch_attend_written(query, *caches, *spans, window, scale, sinks, cap=cap)
    out = launch_attend_chunk(query, *new, *caches, *spans, window, scale, sinks, cap)
    launch_write_cache(*new, *caches, *spans)
    return out


torch.library.impl("graphcore::attend", "CUDA", launch_attend)
