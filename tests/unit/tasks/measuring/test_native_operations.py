"""What task=microbench calls the instructions of a native program."""

import ctypes

import pytest

from graphcore.kernels.cpu import instructions
from graphcore.tasks.measuring.native_operations import instruction_name

KINDS = [one for one in vars(instructions).values() if isinstance(one, type) and hasattr(one, "KIND")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_has_a_name(kind: type[ctypes.Structure]) -> None:
    assert instruction_name(kind(), logits=1).kind


def test_an_elementwise_instruction_is_named_by_its_size() -> None:
    assert instruction_name(instructions.Elementwise(size=48), logits=1) == ("elementwise", "48", "f32")


def test_kinds_have_names_of_their_own() -> None:
    assert len({instruction_name(kind(), logits=1).kind for kind in KINDS}) == len(KINDS)
