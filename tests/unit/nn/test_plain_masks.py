"""Mask helpers against masks written out by hand and against transformers' own."""

import pytest
import torch
from support.comparisons import causal_mask, sliding_window_causal_mask
from torch import Tensor
from transformers import Gemma3TextConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

X = float("-inf")


def test_causal_mask_is_zero_on_and_below_the_diagonal_and_minus_infinity_above() -> None:
    expected = torch.tensor([[0.0, X, X, X], [0.0, 0.0, X, X], [0.0, 0.0, 0.0, X], [0.0, 0.0, 0.0, 0.0]])
    mask = causal_mask(4)
    assert mask.shape == (1, 1, 4, 4)
    assert mask.dtype == torch.float32
    assert torch.equal(mask[0, 0], expected)


def test_sliding_mask_of_two_shows_a_query_its_own_key_and_the_one_before() -> None:
    expected = torch.tensor([[0.0, X, X, X], [0.0, 0.0, X, X], [X, 0.0, 0.0, X], [X, X, 0.0, 0.0]])
    mask = sliding_window_causal_mask(4, 2)
    assert mask.shape == (1, 1, 4, 4)
    assert torch.equal(mask[0, 0], expected)


def test_window_of_one_shows_a_query_its_own_key_only() -> None:
    assert torch.equal(sliding_window_causal_mask(5, 1)[0, 0] == 0, torch.eye(5, dtype=torch.bool))


@pytest.mark.parametrize("window", [6, 7, 100])
def test_window_that_holds_the_sequence_is_the_causal_mask(window: int) -> None:
    assert torch.equal(sliding_window_causal_mask(6, window), causal_mask(6))


def test_mask_of_one_token_lets_it_see_itself() -> None:
    assert causal_mask(1).tolist() == [[[[0.0]]]]


def of_transformers(create: object, tokens: int, window: int) -> Tensor:
    config = Gemma3TextConfig(hidden_size=8, num_hidden_layers=1, sliding_window=window)
    config._attn_implementation = "eager"
    positions = torch.arange(tokens)[None]
    mask = create(  # type: ignore[operator]
        config=config,
        inputs_embeds=torch.zeros(1, tokens, 8),
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    return mask == 0


@pytest.mark.parametrize(("tokens", "window"), [(7, 3), (20, 16), (9, 1), (5, 8)])
def test_masks_show_what_transformers_masks_show(tokens: int, window: int) -> None:
    assert torch.equal(causal_mask(tokens) == 0, of_transformers(create_causal_mask, tokens, window))
    ours = sliding_window_causal_mask(tokens, window) == 0
    assert torch.equal(ours, of_transformers(create_sliding_window_causal_mask, tokens, window))
