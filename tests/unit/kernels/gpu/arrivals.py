"""Runs a launch's programs in other orders than the interpreter's own."""

import random
from collections.abc import Iterator

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

ORDERS = 4


def orders_of_arrival(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield once for each order; launches in between have their programs in it: all reversed, then at random."""
    if torch.cuda.is_available():
        pytest.skip("the order of programs is the GPU's own")
    own = interpreter_builder.set_grid_idx
    shuffled: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for order in range(ORDERS):

        def place(*index: int, order: int = order) -> None:
            grid = interpreter_builder.grid_dim
            if not any(index):
                indices = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
                indices = indices[::-1] if order == 0 else random.Random(order).sample(indices, len(indices))
                shuffled[tuple(grid)] = indices
            x, y, z = index
            own(*shuffled[tuple(grid)][(x * grid[1] + y) * grid[2] + z])

        with monkeypatch.context() as patch:
            patch.setattr(interpreter_builder, "set_grid_idx", place)
            yield order
