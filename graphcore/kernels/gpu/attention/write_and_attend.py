"""`graphcore::attend` on a GPU; kernels/attend.py says what it computes.

One token is written, then attended by split-KV decode. A chunk is attended before it is written, because in a ring it
may overwrite keys that it sees. Both launches are on one stream, in this order; nothing is read back.
"""

from typing import Any

import torch
from torch import Tensor

from graphcore.kernels.attend import kept_of_pass
from graphcore.kernels.cache_codes import heads_of
from graphcore.kernels.gpu.attention.coded_heads import launch_mix_heads
from graphcore.kernels.gpu.attention.decode import launch_attend_written
from graphcore.kernels.gpu.attention.prefill import launch_attend_chunk
from graphcore.kernels.gpu.attention.write_cache import launch_write_cache
from graphcore.kernels.scoring import Scoring


def launch_attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    *how: Any,
    **named: Any,
) -> Tensor:
    """Implement `attend`; the arguments after `counts` are the fields of `Scoring`."""
    scoring = Scoring(*how, **named)
    caches, spans, is_kept = (k_cache, v_cache, table), (starts, counts), key is None
    if key is None or value is None:
        key, value = (heads_of(one, query.dtype) for one in kept_of_pass(query.shape[1], caches[:2], table, *spans))
    new = key, value
    if query.shape[1] == 1:
        if not is_kept:
            launch_write_cache(*new, *caches, *spans)
        turned = launch_mix_heads(query, k_cache)
        return launch_attend_written(
            turned, *caches, *spans, scoring.window, scoring.scale, scoring.sinks, cap=scoring.cap
        )
    out = launch_attend_chunk(query, *new, *caches, *spans, scoring, is_kept)
    if not is_kept:
        launch_write_cache(*new, *caches, *spans)
    return out


torch.library.impl("graphcore::attend", "CUDA", launch_attend)
