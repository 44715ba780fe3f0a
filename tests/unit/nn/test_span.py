"""Positions of a pass's tokens."""

import torch

from graphcore.nn.span import Span


def test_positions_count_on_from_each_start() -> None:
    span = Span(torch.tensor([0, 7]), torch.tensor([3, 3]))
    assert span.positions(3).tolist() == [[0, 1, 2], [7, 8, 9]]


def test_padding_repeats_the_last_real_position_so_that_no_table_is_read_past_its_end() -> None:
    span = Span(torch.tensor([5, 0, 9]), torch.tensor([2, 4, 1]))
    assert span.positions(4).tolist() == [[5, 6, 6, 6], [0, 1, 2, 3], [9, 9, 9, 9]]


def test_a_sequence_without_tokens_stands_where_its_last_one_was() -> None:
    span = Span(torch.tensor([6, 0]), torch.tensor([0, 0]))
    assert span.positions(3).tolist() == [[5, 5, 5], [0, 0, 0]]


def test_padding_is_not_real() -> None:
    span = Span(torch.tensor([5, 0, 9]), torch.tensor([2, 3, 0]))
    assert span.is_real(3).tolist() == [[True, True, False], [True, True, True], [False, False, False]]
