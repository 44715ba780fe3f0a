"""What callers hand to an engine, checked once at its border: token ids, hidden states, sampling parameters.

Legend: B batch, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral

import numpy as np
from torch import Tensor

from graphcore.config.settings import SamplingSettings
from graphcore.config.validate import check_sampling
from graphcore.engine.sampler import SamplingParams
from graphcore.errors import ConfigError


def token_row(row: object, vocab: int) -> list[int]:
    """Return one sequence's token ids as a list.

    Raises:
        ConfigError: it is no sequence, or empty, or holds something that is no token of a vocabulary of that size.
    """
    row = row.tolist() if isinstance(row, Tensor | np.ndarray) else row
    if not isinstance(row, Sequence):
        raise ConfigError(f"token ids must be a list for each sequence, [[1, 2, 3]], found {type(row).__name__}")
    if not row:
        raise ConfigError("the prompt is empty; give at least one token")
    for token_id in row:
        if not isinstance(token_id, Integral):
            raise ConfigError(f"token ids must be whole numbers, found {token_id!r}")
        if not 0 <= int(token_id) < vocab:
            raise ConfigError(f"token id {token_id} is not in the vocabulary of {vocab} tokens")
    return [int(token_id) for token_id in row]


def equal_rows(rows: object, vocab: int) -> list[list[int]]:
    """Return the token ids of sequences of one length.

    Raises:
        ConfigError: there is none, one is not what `token_row` takes, or their lengths differ.
    """
    rows = rows.tolist() if isinstance(rows, Tensor | np.ndarray) else rows
    if not isinstance(rows, Sequence) or not rows:
        raise ConfigError("there is no sequence; give at least one, [[1, 2, 3]]")
    checked = [token_row(row, vocab) for row in rows]
    lengths = sorted(set(map(len, checked)))
    if len(lengths) > 1:
        raise ConfigError(
            f"token_ids must be [B, T], found rows of {lengths[0]} and of {lengths[-1]} tokens; call once per length"
        )
    return checked


def check_hidden(hidden_states: Tensor, dim: int) -> None:
    """Return if the hidden states are [B, T, dim], with at least one token.

    Raises:
        ConfigError: they are not.
    """
    if not isinstance(hidden_states, Tensor):
        raise ConfigError(f"hidden_states must be a torch tensor, found {type(hidden_states).__name__}")
    if hidden_states.ndim != 3 or hidden_states.shape[-1] != dim or not hidden_states.numel():
        raise ConfigError(
            f"hidden_states must be [B, T, {dim}] with at least one token, found {list(hidden_states.shape)}"
        )


def check_new_tokens(count: object) -> None:
    """Return if `count` is a number of tokens to generate.

    Raises:
        ConfigError: it is not a whole number, or below 1.
    """
    if not isinstance(count, Integral) or int(count) < 1:
        raise ConfigError(f"max_new_tokens={count!r} must be a whole number of at least 1")


def sampling_params(values: Mapping[str, float | int]) -> SamplingParams:
    """Return checked sampling parameters.

    Raises:
        ConfigError: a name is unknown or a value out of range.
    """
    known = SamplingParams()
    unknown = values.keys() - vars(known).keys()
    if unknown:
        raise ConfigError(f"unknown sampling parameter '{sorted(unknown)[0]}'; known: {', '.join(vars(known))}")
    for name, value in values.items():
        _check_number(name, value, is_whole=name in ("top_k", "seed"))
    merged = {**vars(known), **values}
    seed = int(merged.pop("seed"))
    check_sampling(SamplingSettings(**merged))
    return SamplingParams(**{**merged, "top_k": int(merged["top_k"])}, seed=seed)


def _check_number(name: str, value: object, is_whole: bool) -> None:
    if not isinstance(value, int if is_whole else int | float):
        raise ConfigError(f"{name}={value!r} must be a {'whole ' if is_whole else ''}number")


def params_from(params: SamplingParams, first: int) -> SamplingParams:
    """Return the parameters of a batch whose first request is number `first` of its call.

    Each request draws by its number in the call, so that the batch size does not change what it draws.
    """
    return replace(params, seed=params.seed + first)
