"""The attention op of a decode step: takes the projections' heads, writes the KV cache, returns the heads' outputs.

Legend: B batch, H heads, K kv heads, E head dim, A features of a head that rotate, N pages of a sequence.

`decode.py` has the kernel; `attend` calls it for one token of each sequence, too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.attention.decode import launch_attend_token
from graphcore.kernels.ops.attention_parameters import AttentionParameters


class HeadNorms(NamedTuple):
    """RMSNorms of each head of the queries and the keys, before they are rotated.

    Attributes:
        q_weight, k_weight: [E] float32.
        eps, scale_in_float32: settings of both, as in gpu/norm.py.
    """

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    scale_in_float32: bool = True


def attend_token(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    scoring: AttentionParameters,
    arrivals: Tensor | None = None,
    rope: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Write one new token's key and value into each sequence's cache, and attend to them and all earlier keys.

    Args:
        query: [B, 1, H, E] compute dtype; the last stride is 1, as of key and value.
        key, value: [B, 1, K, E] compute dtype, or None if the cache holds them already.
        k_cache, v_cache: pools as in `attend`; position start is written if count is not 0.
        table: [B, N] int32, pages of each sequence, as in `attend`.
        starts: [B] int64, the token's position.
        counts: [B] int64, 1, or 0 for a row without a token, whose output is zeros.
        scoring: settings, as in `attend`.
        arrivals: [B * K or more] int32, counters that are zero before and after; all layers of a stream may share
            them. None to allocate them in each call, which launches one more fill.
        rope: [B, 1, 2, A/2] float32, contiguous, as in nn/rope.py's `rotate`, for queries and keys; or None.
        norms: norms of queries and keys; None if there are none.

    Returns:
        [B, 1, H, E] compute dtype, contiguous.
    """
    op = torch.ops.graphcore.attend_token.default
    place, how = (k_cache, v_cache, table, starts, counts), (scoring.window, scoring.scale, scoring.sinks)
    return op(query, key, value, *place, *how, arrivals, scoring.cap, rope, *(norms or HeadNorms()))  # type: ignore[no-any-return]


register_custom_op(
    "attend_token",
    launch_attend_token,
    lambda query: torch.empty_like(query, memory_format=torch.contiguous_format),
    schema="(Tensor query, Tensor? key, Tensor? value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor table,"
    " Tensor starts, Tensor counts, int window, float scale, Tensor? sinks=None, Tensor(c!)? arrivals=None,"
    " float cap=0.0, Tensor? rope=None, Tensor? q_weight=None, Tensor? k_weight=None, float eps=0.0,"
    " bool scale_in_float32=True) -> Tensor",
)
