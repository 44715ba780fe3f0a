"""A GPU's decode kernels have one table of operations, and a class whose methods run them: neither has more or less."""

import pytest

from graphcore.graph.gpu.kernel_obstacles import OPERATIONS, entries_of
from graphcore.nn.mlp import capped

pytest.importorskip("triton", reason="the methods launch kernels")
from graphcore.graph.gpu.kernel_entries import ENTRIES, DeviceRun


def methods() -> dict[str, object]:
    """Return a method for each name of the table."""
    return {entry.method: lambda _run: None for entry in OPERATIONS.values()}


def test_each_operation_runs_as_the_method_that_its_line_names() -> None:
    assert {operation: entry.__name__ for operation, entry in ENTRIES.items()} == {
        operation: entry.method for operation, entry in OPERATIONS.items()
    }
    assert ENTRIES[capped] is DeviceRun.capped


def test_an_operation_without_an_entry_is_named() -> None:
    made = methods()
    del made["capped"]
    with pytest.raises(AssertionError, match="Kernels has no method capped"):
        entries_of(type("Kernels", (), made))


def test_an_entry_without_an_operation_is_named() -> None:
    made = methods() | {"softsign": lambda _run, x: x, "run": lambda _run: None, "_module": lambda _run: None}
    with pytest.raises(AssertionError, match="no softsign, a method of Kernels"):
        entries_of(type("Kernels", (), made), besides=("run",))
