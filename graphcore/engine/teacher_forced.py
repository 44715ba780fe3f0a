"""What a model makes of given tokens, batch by batch: logits, hidden states, attention weights.

Legend: B batch, T tokens, D model dim, H heads, V vocab.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphcore.engine.token_runner import TokenRunner

Rows = Sequence[Sequence[int]]


def teacher_forced(
    runner: TokenRunner, rows: Rows, hidden_states: bool, attentions: bool
) -> Tensor | tuple[Tensor, *tuple[tuple[Tensor, ...], ...]]:
    """Return the logits of rows of one length, [B, T, V], alone or with what else is wanted.

    Args:
        hidden_states: also return the residual stream after the embedding and after each block, [B, T, D] each.
        attentions: also return each layer's attention weights, [B, H, T, T] each.

    Raises:
        ConfigError: what runs never has attention weights.
    """
    waves = [rows[at : at + runner.batch_size] for at in range(0, len(rows), runner.batch_size)]
    # Attention weights first: a runner that has none says so before anything is computed.
    weights = [_by_layer(runner.attentions, waves)] if attentions else []
    logits = torch.cat([runner.logits(wave) for wave in waves])
    more: list[tuple[Tensor, ...]] = [_by_layer(runner.hidden_states, waves)] if hidden_states else []
    more += weights
    return (logits, *more) if more else logits


def _by_layer(run: Callable[[Rows], tuple[Tensor, ...]], waves: Sequence[Rows]) -> tuple[Tensor, ...]:
    """Return what every wave gives for each layer, joined along the batch."""
    return tuple(torch.cat(layer) for layer in zip(*(run(wave) for wave in waves), strict=True))
