"""The instructions of native programs as text, one line each, with names for what they point to.

A weight, a cache or an input has its own name; a buffer of the program is a number, in the order of appearance. Fields
that are zero are left out.
"""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from graphcore.graph.builder import GraphBuilder
from graphcore.graph.program import Program
from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu.program import NativeProgram
from graphcore.kvcache.buffers import KVCache, RecurrentCache

GOLDEN = Path(__file__).parent / "golden" / "native_programs.txt"
KINDS = {
    structure.KIND: name.lower()
    for name, structure in vars(instructions).items()
    if isinstance(structure, type) and hasattr(structure, "KIND")
}


def native_list(builder: GraphBuilder, program: Program) -> list[str]:
    """Return the instructions of a builder's decode program."""
    names = dict(_named(builder, program))
    (native,) = {id(step.program): step.program for step in program.steps if hasattr(step, "program")}.values()
    assert isinstance(native, NativeProgram)
    return [f"{KINDS[item.KIND]} {_fields(item, names)}" for item in native.arguments]


def _named(builder: GraphBuilder, program: Program) -> Iterator[tuple[int, str]]:
    """Yield the addresses that have names."""
    for prefix, module in builder.decoder.groups():
        for name, tensor in module.named_buffers():
            yield tensor.data_ptr(), prefix + name
    for layer, cache in enumerate(builder.caches):
        names = ("state", "inputs") if isinstance(cache, RecurrentCache) else ("k cache", "v cache")
        for name, tensor in zip(names, cache.tensors, strict=True):
            yield tensor.data_ptr(), f"{name} {layer}"
        if isinstance(cache, KVCache):
            yield cache.table.data_ptr(), "table"
    state = program.state
    inputs: dict[str, Tensor] = {"token_ids": state.token_ids, "starts": state.span.starts, "logits": state.logits}
    for name, tensor in (inputs | {"chosen": state.chosen, "sequences": state.sequences}).items():
        yield tensor.data_ptr(), name
    for index, table in enumerate(builder.tables):
        yield table.data_ptr(), f"rope {index}"


def _fields(item: ctypes.Structure, names: dict[int, str]) -> str:
    texts = ((name, _text(getattr(item, name), kind, names)) for name, kind in item._fields_)
    return ", ".join(f"{name} {text}" for name, text in texts if text not in ("-", "0", "[-]"))


def _text(value: object, kind: object, names: dict[int, str]) -> str:
    if isinstance(value, instructions.PerRow):
        return _text(value.first, ctypes.c_void_p, names)
    if isinstance(value, ctypes.Structure):
        return f"({_fields(value, names)})" if any(bytes(value)) else "-"
    if isinstance(value, ctypes.Array):
        texts = "; ".join(_text(one, value._type_, names) for one in value)
        return re.sub(r"(; -)+$", "", f"[{texts}") + "]"
    if kind is ctypes.c_void_p:
        return "-" if value is None else names.setdefault(value, f"#{sum(one[0] == '#' for one in names.values())}")
    return f"{value:.7g}" if isinstance(value, float) else str(value)
