"""GGUF's tensors are put together of the decoder's weights, and its folds bring those back."""

import pytest
import torch

from graphcore.arch.architecture import TensorSource
from graphcore.arch.folds import AddOne, PickRows, SplitPairs
from graphcore.errors import UnsupportedError
from graphcore.export.gguf_tensors import Member, gguf_members, gguf_shape, unfolded

SOURCES = {
    "k": TensorSource("qkv", (PickRows(4, 6), SplitPairs(1))),
    "q": TensorSource("qkv", (PickRows(0, 4), SplitPairs(2))),
    "o": TensorSource("out"),
}
SHAPES = {"q": (4, 3), "k": (2, 3), "o": (3, 4)}


def test_parts_of_a_tensor_are_found_in_the_order_of_their_rows() -> None:
    members = gguf_members(list(SOURCES), SOURCES.__getitem__)
    assert {name: [member.name for member in parts] for name, parts in members.items()} == {
        "qkv": ["q", "k"],
        "out": ["o"],
    }
    assert gguf_shape(members["qkv"], SHAPES) == (6, 3)


def test_the_folds_of_what_was_put_together_give_the_parts() -> None:
    members = gguf_members(list(SOURCES), SOURCES.__getitem__)
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    whole = unfolded(members["qkv"], weights.__getitem__, "qkv")
    for name in ("q", "k"):
        part = whole
        for fold in SOURCES[name].folds:
            part = fold.apply(part)
        assert torch.equal(part, weights[name])


def test_a_fold_without_a_way_back_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="norm: AddOne has no way back"):
        unfolded((Member("n", (AddOne(),)),), lambda _: torch.ones(2), "norm")
