"""Every name of torch that graphcore says is there, and takes what it is called with, in whatever torch is installed.

What runs only on a GPU is not run here; a name that a version of torch renames would be found there first.
"""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from support.cases import in_case

import graphcore

SOURCES = sorted(Path(graphcore.__file__).parent.rglob("*.py"))
# Methods of what CUDA calls return, whose class no name in the source tells: (class, method, positionals, keywords).
METHODS = [
    ("torch.cuda.CUDAGraph", "replay", 0, ()),
    ("torch.cuda.CUDAGraph", "pool", 0, ()),
    ("torch.cuda.CUDAGraph", "reset", 0, ()),
    ("torch.cuda.Stream", "wait_stream", 1, ()),
    ("torch.cuda.Stream", "wait_event", 1, ()),
    ("torch.cuda.Stream", "synchronize", 0, ()),
    ("torch.cuda.Event", "record", 1, ()),
    ("torch.cuda.Event", "query", 0, ()),
    ("torch.cuda.Event", "synchronize", 0, ()),
    ("torch.cuda.Event", "elapsed_time", 1, ()),
]


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def dotted(node: ast.AST) -> str:
    """Return "torch.cuda.graph" for such a chain of attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner else ""


def names_in(path: Path) -> set[str]:
    """Return the chains that begin with torch; those of custom ops are made at run time."""
    found = {dotted(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    return {name for name in found if name.startswith("torch.") and not name.startswith("torch.ops.")}


def resolve(name: str) -> object:
    """Return what a dotted name stands for; raises AttributeError."""
    found: object = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def calls_in(path: Path) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield name, number of positionals and keywords of every call of torch.cuda that has no starred ones."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call) or not dotted(node.func).startswith("torch.cuda."):
            continue
        keywords = [keyword.arg for keyword in node.keywords]
        if None not in keywords and not any(isinstance(argument, ast.Starred) for argument in node.args):
            yield dotted(node.func), len(node.args), tuple(map(str, keywords))


def test_every_name_of_torch_is_there() -> None:
    import torch._dynamo  # what compiles brings it

    missing, found = [], 0
    for path in (path for path in SOURCES if "torch." in text_of(path)):
        for name in sorted(names_in(path)):
            found += 1
            try:
                resolve(name)
            except AttributeError as error:
                missing.append(f"{path}: torch {torch.__version__} has no {name}: {error}")
    assert found > 500
    assert missing == []


def bound(name: str, positionals: int, keywords: tuple[str, ...], first: tuple[object, ...] = ()) -> None:
    inspect.signature(resolve(name)).bind(*first, *[None] * positionals, **dict.fromkeys(keywords))


# Only these are parsed when tests are collected, which every worker does.
CALLS = sorted({call for path in SOURCES if "torch.cuda." in text_of(path) for call in calls_in(path)})


def test_every_call_of_torch_cuda_fits_its_signature() -> None:
    for name, positionals, keywords in CALLS:
        with in_case(name, positionals, keywords):
            bound(name, positionals, keywords)


@pytest.mark.parametrize(("owner", "method", "positionals", "keywords"), METHODS)
def test_every_method_of_streams_events_and_graphs_fits(
    owner: str, method: str, positionals: int, keywords: tuple[str, ...]
) -> None:
    bound(f"{owner}.{method}", positionals, keywords, first=(None,))


def test_a_name_or_an_argument_that_is_not_there_is_found() -> None:
    with pytest.raises(AttributeError):
        resolve("torch.cuda.no_such_thing")
    with pytest.raises(TypeError):
        bound("torch.cuda.graph", 1, ("no_such_argument",))


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU build of torch has no bindings of CUDA's runtime")
def test_cuda_builds_bind_what_is_registered_and_captured() -> None:
    from torch._C import _cudart as runtime

    for name in ("cudaHostRegister", "cudaHostUnregister", "cudaGetErrorString", "cudaError", "cudaMemGetInfo"):
        assert hasattr(runtime, name), name
    assert hasattr(torch.cuda.CUDAGraph, "register_generator_state")
