"""Settings of attention besides its tensors: scale, window, sinks and soft cap of the scores.

Legend: H heads, K kv heads, L live keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionParameters(NamedTuple):
    """The last arguments of `attend` (kernels/ops/attend.py), in the order of the op's schema and with its defaults.

    Attributes:
        window: largest number of keys that a query sees, its own included; 0 for all.
        scale: factor of q . k.
        sinks: [H] float32, attention sinks: an extra score of each head in the softmax, without a value; not scaled.
        library: file of the C++ kernels, for the CPU; empty for plain torch. A `NativeBackend` sets it.
        cap: bound of the scores, s = cap * tanh(scale * q . k / cap), before the mask; 0 for none.
        values_from: index of the feature at which the value begins in a row of the keys' pool; 0 if values have a pool
            of their own.
    """

    window: int
    scale: float
    sinks: Tensor | None = None
    library: str = ""
    cap: float = 0.0
    values_from: int = 0

    def scores(self, products: Tensor) -> Tensor:
        """Return the scaled and capped scores of products q . k, float32; float32 products are overwritten."""
        scores = products.float().mul_(self.scale)
        return scores.div_(self.cap).tanh_().mul_(self.cap) if self.cap else scores

    def weights(self, scores: Tensor) -> Tensor:
        """Return the softmax of [K, H/K, ..., L] over the last axis and the heads' sinks, whose weights are dropped."""
        if self.sinks is None:
            return scores.softmax(dim=-1)
        sinks = self.sinks.view(*scores.shape[:2], *(1 for _ in scores.shape[2:]))
        row = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        return row.softmax(dim=-1)[..., :-1]
