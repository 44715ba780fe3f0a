"""Every tensor that the package makes names its dtype and its device, so that a program's defaults change nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

import graphcore

PACKAGE = Path(graphcore.__file__).parent
CONSTRUCTORS = {function.__name__ for function in _device_constructors()} | {"Tensor"}
EXAMPLE = """
class Layer:
    def __init__(self):
        torch.empty(3, dtype=torch.float32)
        torch.arange(3, device="cpu")
def run(device):
    torch.zeros(3, dtype=torch.int64, device=device)
    torch.full((3,), 1.0, dtype=torch.float32)
"""


def nameless(tree: ast.Module, is_module_file: bool) -> Iterator[tuple[int, str]]:
    """Yield line and keyword of each call that makes a tensor and leaves its dtype or device to the defaults.

    Args:
        is_module_file: True for files of nn/, whose constructors leave the device to `with torch.device(...)` of
            whoever builds a model: the meta device, on which weights have no memory.
    """
    constructors = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    placeless = {id(inner) for node in constructors for inner in ast.walk(node)} if is_module_file else set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in CONSTRUCTORS:
                given = {keyword.arg for keyword in node.keywords}
                needed = ("dtype",) if id(node) in placeless else ("dtype", "device")
                yield from ((node.lineno, keyword) for keyword in needed if keyword not in given)


def test_every_tensor_names_its_dtype_and_device() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} has no {keyword}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, keyword in nameless(ast.parse(path.read_text()), path.is_relative_to(PACKAGE / "nn"))
    ]
    assert found == []


def test_the_search_finds_what_is_missing() -> None:
    assert sorted(nameless(ast.parse(EXAMPLE), is_module_file=True)) == [(5, "dtype"), (8, "device")]
    assert sorted(nameless(ast.parse(EXAMPLE), is_module_file=False)) == [(4, "device"), (5, "dtype"), (8, "device")]
    assert {"empty", "tensor", "arange", "randint", "asarray"} <= CONSTRUCTORS
