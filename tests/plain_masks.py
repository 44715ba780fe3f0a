"""Which keys each query sees, as additive masks: the plain statement that tests hold attention to.

Legend: T tokens.

The engine itself builds no such mask: kernels/ops/attend.py compares positions (CUDA) or slices the live keys (CPU).
These two say the same thing in the form that transformers and scaled_dot_product_attention take.
"""

import torch
from torch import Tensor


def causal_mask(seq_len: int) -> Tensor:
    """Return [1, 1, T, T] float32: 0 where query t sees key s (s <= t), -inf where it does not."""
    return _additive(_distances(seq_len) >= 0)


def sliding_window_causal_mask(seq_len: int, window_size: int) -> Tensor:
    """Return [1, 1, T, T] float32: 0 for the last `window_size` keys, the query's own included, and -inf for others."""
    distances = _distances(seq_len)
    return _additive((distances >= 0) & (distances < window_size))


def _distances(seq_len: int) -> Tensor:
    """Return how far each key lies behind each query: [T, T] int64."""
    positions = torch.arange(seq_len)
    return positions[:, None] - positions


def _additive(visible: Tensor) -> Tensor:
    return torch.zeros(1, 1, *visible.shape).masked_fill(~visible, float("-inf"))
