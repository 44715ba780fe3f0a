"""What the loops of one token's products cost a GPU, read from machine code; records to compare with.

    python tests/gpu_compile.py table [--write] [part of a case's name ...]

Numbers are of an H100 (sm_90): 132 multiprocessors with 65536 registers, 64 warps, 32 programs and 227 KiB of shared
memory each. A record is kept for each version of Triton in `golden/gpu_loops.json`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from graphcore.kernels.gpu.layout import DeviceLayout

RECORDS = Path(__file__).parent / "golden" / "gpu_loops.json"
MULTIPROCESSORS, REGISTERS, WARPS, PROGRAMS, THREADS = 132, 65536, 64, 32, 32
SHARED, SHARED_OF_SYSTEM = 228 << 10, 1 << 10  # bytes; the second are taken from the first for each program
CASES = ("product", "experts")  # parts of the names of the cases that launch products
SLACK = 1.005  # instructions a weight are rounded in a record


@dataclass(frozen=True)
class Names:
    """The arguments of a kernel that say how much one trip of its loop multiplies.

    Attributes:
        layout: of the packed matrix; empty if it is dense.  rows: of a program.
        along: whose product is the number of vectors, or numbers, of a row that a program reads at once.
        matrices: how many the program multiplies.
    """

    layout: str
    rows: str
    along: tuple[str, ...]
    matrices: int = 1


KERNELS = {
    "_packed_product": Names("L", "R", ("G",)),
    "_packed_gated": Names("L", "R", ("G",), matrices=2),
    "_dense_product": Names("", "R", ("G", "V")),
    "_dense_gated": Names("", "R", ("G", "V"), matrices=2),
    "_down": Names("FORM", "ROWS", ("VECTORS",)),
    "_gate_up": Names("GATE", "ROWS", ("VECTORS",), matrices=2),
}


@dataclass(frozen=True)
class Trip:
    """What one trip of a launch's loop multiplies, and how many programs there are.

    Attributes:
        weights: of all rows and matrices.  nbytes: of them, scales included.
        count: trips that it takes to the end of a row.
        programs: of the launch.
    """

    weights: int
    nbytes: int
    count: int
    programs: int


@dataclass(frozen=True)
class Loops:
    """What the loops of one launch cost; fewer are better, of programs and bytes in flight more.

    Attributes:
        instructions: of the loops, for a weight.  whole: of everything from a program's start to its end.
        registers: of a thread.  shared: bytes of a program.
        programs: that a multiprocessor holds at once.  waves: programs of the launch for each that has a place.
        barriers, round_trips: in the loops; a round trip is a read of shared memory after writes.
        narrow: reads of one or two bytes in the loops.  wide: reads of 16 bytes.
        in_flight: bytes of matrices that one trip of a loop asks for, in all programs of a multiprocessor.
    """

    instructions: float
    whole: float
    registers: int
    shared: int
    programs: int
    waves: float
    barriers: int
    round_trips: int
    narrow: int
    wide: int
    in_flight: int


def trip_of(kernel: str, arguments: Mapping[str, Any], grid: tuple[int, ...]) -> Trip | None:
    """Return what a trip of a launch multiplies; None if its loops are not counted."""
    names = KERNELS.get(kernel)
    if names is None or arguments.get("DOTS") or (names.layout and arguments[names.layout] is None):
        return None
    fed = arguments["x"] if "x" in arguments else arguments["hidden"]
    if fed.dtype is torch.float32:
        return None
    rows, along = arguments[names.rows], math.prod(arguments[name] for name in names.along)
    if names.layout:
        layout = DeviceLayout(*arguments[names.layout])
        along *= 128 // layout.low
        bits = layout.low + layout.high + 8 * layout.scale_nbytes / layout.group
        bits += 8 * layout.super_nbytes / layout.super_weights
        columns = arguments["columns"]
    else:
        pairs = fed.element_size() // 2  # bf16 comes in pairs
        along, columns, bits = along * pairs, arguments["columns"] * pairs, 16
    weights = rows * along * names.matrices
    return Trip(weights, round(weights * bits / 8), math.ceil(columns / along), math.prod(grid))


def loops_of(code: str, trip: Trip, registers: int, shared: int, warps: int) -> Loops:
    """Return the numbers of a kernel's disassembly."""
    lines, bodies = instructions_of(code)
    loops = [lines[begin:end] for begin, end in innermost(bodies) if any("LDG" in one for one in lines[begin:end])]
    loops = loops or [lines]  # a row of one trip needs no loop
    issued, everything = sum(map(len, loops)) * warps, len(lines) * warps
    opcodes = Counter(one.split(".")[0] for loop in loops for one in loop)
    sizes = Counter(load_nbytes(one) for loop in loops for one in loop if one.startswith("LDG"))
    programs = programs_at_once(registers, shared, warps)
    return Loops(
        instructions=round(issued * THREADS / trip.weights, 2),
        whole=round((everything + issued * (trip.count - 1)) * THREADS / (trip.weights * trip.count), 2),
        registers=registers,
        shared=shared,
        programs=programs,
        waves=round(trip.programs / (programs * MULTIPROCESSORS), 2),
        barriers=opcodes["BAR"],
        round_trips=sum(map(round_trips, loops)),
        narrow=sizes[1] + sizes[2],
        wide=sizes[16],
        in_flight=trip.nbytes * programs // len(loops),
    )


def instructions_of(code: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the opcodes of a disassembly, without those behind its end, and each loop's first and end."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    bodies: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*);", line):
            target = re.search(r"`\((\.L_x_\d+)\)", found[2])
            if found[1].startswith("BRA") and target and target[1] in labels:
                if labels[target[1]] == len(lines):  # the end of the code is a branch to itself
                    break
                bodies.append((labels[target[1]], len(lines) + 1))
            if found[1] != "NOP":
                lines.append(found[1])
    return lines, bodies


def innermost(bodies: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the loops that no other loop lies in."""
    bodies = sorted(set(bodies))
    return [
        one for one in bodies if not any(one != other and one[0] <= other[0] < other[1] <= one[1] for other in bodies)
    ]


def load_nbytes(opcode: str) -> int:
    """Return the bytes that a read of global memory gives a thread."""
    sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return max((sizes.get(part, 0) for part in opcode.split(".")), default=0) or 4


def round_trips(loop: Iterable[str]) -> int:
    """Return how often shared memory is read after it was written."""
    accesses = [one.startswith("ST") for one in loop if one.split(".")[0] in ("STS", "STSM", "LDS", "LDSM")]
    return sum(before and not now for before, now in pairwise(accesses))


def programs_at_once(registers: int, shared: int, warps: int) -> int:
    """Return the programs that a multiprocessor of an H100 holds: registers are given to a warp in steps of 256."""
    of_warp = math.ceil(registers / 8) * 8 * THREADS
    by_registers = REGISTERS // 4 // of_warp * 4 // warps  # each quarter has warps of its own
    by_shared = SHARED // (math.ceil(shared / 128) * 128 + SHARED_OF_SYSTEM)
    return min(PROGRAMS, WARPS // warps, by_registers, by_shared)


def triton_version() -> str:
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def recorded() -> dict[str, dict[str, dict[str, float]]]:
    """Return the records: version of Triton, launch, number."""
    return json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}


def launch_name(case: str, kernel: str) -> str:
    return f"{case} {kernel}"


def write(found: Mapping[str, Mapping[str, float]], is_whole: bool) -> None:
    """Record launches for this version of Triton; records of others go if these are all launches, else they stay."""
    records = recorded()
    others = {} if is_whole else records.get(triton_version(), {})
    records[triton_version()] = dict(sorted({**others, **found}.items()))
    versions = (
        json.dumps(version)
        + ": {\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in launches.items())
        + "\n}"
        for version, launches in sorted(records.items())
    )
    RECORDS.write_text("{\n" + ",\n".join(versions) + "\n}\n", encoding="utf-8")


def worse(record: Mapping[str, float], found: Mapping[str, float]) -> list[str]:
    """Return which numbers are worse than a record's, and how."""
    if not record:
        return ["not recorded"]
    fewer_is_better = ("instructions", "whole", "barriers", "round_trips", "narrow")
    more_is_better = ("programs", "in_flight")
    lost = [name for name in fewer_is_better if found[name] > record[name] * SLACK]
    lost += [name for name in more_is_better if found[name] < record[name]]
    return [f"{name} {record[name]:g} -> {found[name]:g}" for name in lost]


def losses(found: Mapping[str, Mapping[str, float]], is_whole: bool) -> list[str]:
    """Return what is worse than the records of this version of Triton, one line for each launch.

    Args:
        is_whole: True if launches that are recorded and not found are lost, too.
    """
    records = recorded().get(triton_version(), {})
    lost = [f"{name}: {', '.join(of)}" for name in found if (of := worse(records.get(name, {}), found[name]))]
    return lost + [f"{name}: gone" for name in records if is_whole and name not in found]


def as_table(found: Mapping[str, Loops]) -> str:
    """Return the numbers as a table for people."""
    names = list(Loops.__dataclass_fields__)
    width = max(map(len, found), default=0)
    lines = [f"{'':{width}}  " + "  ".join(names)]
    for launch, loops in found.items():
        numbers = asdict(loops)
        lines.append(f"{launch:{width}}  " + "  ".join(f"{numbers[name]:>{len(name)}g}" for name in names))
    return "\n".join(lines)
