"""The kernels that a decode step runs on a GPU, and the instructions of native programs, as golden texts."""

import ast
import ctypes
import difflib
import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import graphcore
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.program import Program
from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu.program import NativeProgram
from graphcore.kvcache.buffers import KVCache, RecurrentCache

# The kernels that a decode step runs on a GPU, in order, as golden values of one GPU and torch version.
#
# A list of names is what a captured graph's nodes are: kernels, and copies and fills between them. Their order is that
# of their beginnings. A drift (a kernel more, a fusion lost, a copy that slipped in) is a diff of two lists.

GOLDEN = Path(__file__).parents[1] / "golden" / "kernels"
DECODE = Path(__file__).parents[1] / "golden" / "decode_kernels.json"
SOURCES = Path(graphcore.__file__).parent / "kernels" / "gpu"
WRITE = "pytest -m cuda tests/cuda/test_cuda_kernel_lists.py --kernel-lists tests/golden/kernels"
MOST_LINES = 60  # of a drift that are shown
Lists = dict[str, list[str]]
DecodeKernels = dict[str, list[str]]
ENDS, LAYER = ("first", "head"), ("layer",)  # parts of a decode step in decode_kernels.json


def kernels_of(work: Callable[[], object]) -> list[str]:
    """Return the names of what runs on the GPU while the work runs, without templates' arguments, in order."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    events = [one for one in profiler.events() if one.device_type.name == "CUDA" and not one.is_user_annotation]
    return [plain(one.name) for one in sorted(events, key=lambda one: one.time_range.start)]


def plain(name: str) -> str:
    """Return a kernel's name without its template's arguments and its parameters."""
    return re.sub(r"<.*|\(.*", "", name.removeprefix("void ")).strip() or name


def key_of(gpu: str, torch_version: str) -> str:
    """Return what lists are kept under: "nvidia-h200-torch-2.11"."""
    release = ".".join(torch_version.partition("+")[0].split(".")[:2])
    return f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}-torch-{release}"


def stored_lists(key: str, folder: Path = GOLDEN) -> Lists:
    """Return the lists of a GPU and torch version by what ran; none where nobody has recorded any."""
    path = folder / f"{key}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def store_list(key: str, name: str, found: Sequence[str], folder: Path) -> Path:
    """Add a list to a folder's lists of that GPU and torch version; return the file.

    Several processes may do so at once: each reads what the others have added and writes it again, one at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.json"
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lists = {**stored_lists(key, folder), name: list(found)}
        path.write_text(json.dumps(lists, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    finally:
        os.close(lock)
    return path


def compare_or_store(found: Sequence[str], key: str, name: str, new_lists: Path | None, golden: Path = GOLDEN) -> None:
    """Pass if a list is the golden one; a list that nobody has recorded fails, unless there is a folder to write it to.

    Args:
        new_lists: where a list without a golden one goes; the test is skipped then, for nothing was compared.
    """
    expected = stored_lists(key, golden).get(name)
    if expected is not None:
        changed = drift(found, expected)
        assert not changed, changed
        return
    lacks = f"no golden list of {name} for {key} ({len(found)} kernels)"
    assert new_lists is not None, f"{lacks}: `{WRITE}` writes it; look it through and commit it"
    pytest.skip(f"{lacks}: written to {store_list(key, name, found, new_lists)}")


def store_decode_kernels(path: Path, name: str, found: DecodeKernels) -> None:
    """Set an architecture's part of a file like decode_kernels.json, a line for each list."""
    kept: dict[str, DecodeKernels] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    parts = []
    for architecture, lists in {**kept, name: found}.items():
        lines = ",\n".join(f"    {json.dumps(part)}: {json.dumps(names)}" for part, names in lists.items())
        parts.append(f"  {json.dumps(architecture)}: {{\n{lines}\n  }}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def defined_kernels(sources: Path = SOURCES) -> frozenset[str]:
    """Return the names of all functions that Triton compiles."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sources.rglob("*.py"))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(one.name for one in functions if any("jit" in ast.unparse(mark) for mark in one.decorator_list))


def stale(recorded: Sequence[str], defined: Collection[str], decode: DecodeKernels | None) -> str:
    """Return why a recorded list cannot be that of today's kernels; empty if it can.

    Args:
        recorded: the names of a step, as `kernels_of` gives them.
        defined: names of all kernels of this project; they begin with "_", or are in its decode lists.
        decode: what blocks and head launch by decode_kernels.json; None for an architecture without decode kernels.
    """
    gone = sorted({one for one in recorded if one.startswith("_") and one not in defined})
    if gone:
        return f"names {', '.join(gone)}, which no kernel is called any more"
    if decode is None:
        return ""
    bare = {one.lstrip("_") for one in defined}
    counts = Counter(one.lstrip("_") for one in recorded)
    once, layer = (Counter(one for part in parts for one in decode[part] if one in bare) for parts in (ENDS, LAYER))
    missing = sorted(one for one in once | layer if not counts[one])
    if missing:
        return f"lacks {', '.join(missing)}, which a decode step launches by {DECODE.name}"
    if any(one not in bare and not one.startswith("aten ") for part in decode for one in decode[part]):
        return ""  # a delta rule: layers with it and with attention alternate, and launch different kernels
    layers = {(counts[one] - once[one]) / layer[one] for one in layer}
    if len(layers) == 1 and min(layers) >= 0 and min(layers).is_integer():
        return ""
    return f"launches the kernels of a layer {sorted(layers)} times after the first layer by {DECODE.name}"


def drift(found: Sequence[str], expected: Sequence[str]) -> str:
    """Return how two lists differ, for people; empty if they do not.

    First which kernels run more or less often, then where, by their places in the golden list.
    """
    if list(found) == list(expected):
        return ""
    before, after = Counter(expected), Counter(found)
    names = [name for name in {**before, **after} if before[name] != after[name]]
    counts = [f"    {before[name]} -> {after[name]} times  {name}" for name in names]
    lines = [*counts, *changes(found, expected)]
    cut = [f"... {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return "\n".join([f"{len(expected)} kernels are now {len(found)}:", *lines[:MOST_LINES], *cut])


def changes(found: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Return a line for each kernel that came or went, in order.

    What is alike at both ends is cut off first: layers repeat, and a matcher could shift them against each other.
    """
    shorter = min(len(expected), len(found))
    start = next((at for at in range(shorter) if expected[at] != found[at]), shorter)
    most = shorter - start
    end = next((at for at in range(most) if expected[-1 - at] != found[-1 - at]), most)
    old, new = expected[start : len(expected) - end], found[start : len(found) - end]
    lines: list[str] = []
    # Names that are frequent are no junk here: without them nothing of a long list would match.
    for kind, low, high, new_low, new_high in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            lines += [f"- {start + at}: {old[at]}" for at in range(low, high)]
            lines += [f"+ {start + at}: {new[at]}" for at in range(new_low, new_high)]
    return lines


# The instructions of native programs as text, one line each, with names for what they point to.
#
# A weight, a cache or an input has its own name; a buffer of the program is a number, in the order of appearance.
# Fields that are zero are left out.

PROGRAMS = Path(__file__).parents[1] / "golden" / "native_programs.txt"
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
