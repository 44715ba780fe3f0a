"""`graphcore::attend` on a GPU; kernels/ops/attend.py says what it computes.

One token takes one launch (decode.py). For a chunk, attention runs before the cache is written, because in a ring the
chunk may overwrite keys that it sees. Both launches are on one stream, in this order; the host does not wait. Latent
attention has kernels of its own (latent.py).
"""

from typing import Any

from torch import Tensor

from graphcore.kernels.custom_ops import register_implementation
from graphcore.kernels.gpu.attention.decode import launch_attend_token
from graphcore.kernels.gpu.attention.latent import launch_attend_chunk_latent
from graphcore.kernels.gpu.attention.prefill import launch_attend_chunk
from graphcore.kernels.gpu.attention.write_cache import launch_write_cache
from graphcore.kernels.ops.attend import joined_rows, kept_of_pass, masked_attend
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.kernels.ops.kv_formats import heads_of, is_mixed


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
    """Implement `attend`; the arguments after `counts` are the fields of `AttentionParameters`."""
    scoring = AttentionParameters(*how, **named)
    caches, spans, is_kept = (k_cache, v_cache, table), (starts, counts), key is None
    if scoring.values_from:
        if is_mixed(k_cache):
            return masked_attend(query, key, value, *caches, *spans, *scoring)
        where, row = (k_cache, table, *spans), joined_rows(key, value)
        return launch_attend_chunk_latent(query, row, *where, scoring.values_from, scoring.scale)
    if query.shape[1] == 1:
        return launch_attend_token(query, key, value, *caches, *spans, scoring)
    if key is None or value is None:
        key, value = (heads_of(one, query.dtype) for one in kept_of_pass(query.shape[1], caches[:2], table, *spans))
    out = launch_attend_chunk(query, key, value, *caches, *spans, scoring, is_kept)
    if not is_kept:
        launch_write_cache(key, value, *caches, *spans)
    return out


register_implementation("attend", "CUDA", launch_attend)
