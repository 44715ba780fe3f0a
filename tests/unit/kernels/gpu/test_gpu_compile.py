"""Every GPU kernel compiles for the GPUs that graphcore is for, keeps to its registers, and reads memory widely.

The loops of one token's products take no more than they did when they were last recorded.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gpu_loops
import pytest

pytestmark = pytest.mark.thorough

TESTS = Path(__file__).parents[3]
# kernels of a captured step that begin before the ones in front of them have ended
DEPENDENT = {
    *("_choose", "_dense_gated", "_dense_product", "_down", "_gate_up", "_norm_to_codes", "_packed_gated"),
    *("_packed_product", "_residual_norm", "_route", "attend_splits", "_convolve", "_one_token"),
    "_gated_convolution",
    *("_resolve", "_fill", "_attend_rows", "_add_splits", "_prepare_token", "_project_heads"),
}
# scores of a router; the state of slots; a head; fields of blocks that begin at any even address
READ_LITTLE = ("_choose", "_resolve", "_keep_heads", "_mix_heads", "_write_planes")
# Parts of the names of cases, by compute capability: H100 and H200 (90), A100 (80); () is all of them. Compiling takes
# most of the time, so CI compiles the first case of each kernel and those of SOME, and `-m slow` all of them.
WHOLE = {
    90: (),
    80: (
        *("Llama-3.1-8B", "Gemma 2 9B, whole", "Gemma 3, 8 tokens, q", "q4_k", "mxfp4"),
        *("router", "slots", "BitNet", "delta", "convolution", "level_planes"),
    ),
}
SOME = {
    90: (
        *("--each", "attend: Llama-3.1-8B, 512 tokens, bfloat16", "attend_token: Llama", "experts: summed mxfp4"),
        *("packed_products: q4_k q, k, v", "experts: scored router of DeepSeek V3", "level_planes: iq2_xxs"),
    ),
    80: ("packed_products: q4_k q, k, v",),
}
EXTENTS = [False, pytest.param(True, marks=pytest.mark.slow)]


@cache
def compiled(capability: int, is_whole: bool) -> list[dict[str, Any]]:
    parts = (WHOLE if is_whole else SOME)[capability]
    command = [sys.executable, "-W", "ignore", str(TESTS / "gpu_compile.py"), str(capability), *parts]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("is_whole", EXTENTS)
@pytest.mark.parametrize("capability", WHOLE)
def test_kernels_compile_without_spills_and_with_wide_loads(capability: int, is_whole: bool) -> None:
    kernels = compiled(capability, is_whole)
    assert kernels
    assert [one for one in kernels if one["stack"]] == []
    assert [one for one in kernels if one["widest_load"] < 16 and one["kernel"] not in READ_LITTLE] == []


@pytest.mark.parametrize("is_whole", EXTENTS)
def test_dependent_launches_wait_before_they_touch_memory(is_whole: bool) -> None:
    dependent = [one for one in compiled(90, is_whole) if one["early"] is not None]
    kernels = {one["kernel"] for one in dependent}
    assert kernels == DEPENDENT
    assert [one for one in dependent if one["early"]] == []
    assert [one for one in compiled(80, is_whole) if one["early"] is not None] == [], (
        "an A100 has no dependent launches"
    )


@pytest.mark.parametrize("is_whole", EXTENTS)
def test_no_loop_of_a_product_got_worse(is_whole: bool) -> None:
    if gpu_loops.triton_version() not in gpu_loops.recorded():
        pytest.skip(f"no loops are recorded for Triton {gpu_loops.triton_version()}: gpu_compile.py table --write")
    launches = [one for one in compiled(90, is_whole) if one["loops"]]
    found = {gpu_loops.launch_name(one["case"], one["kernel"]): one["loops"] for one in launches}
    assert len(found) > (20 if is_whole else 2), "cases of products are no longer found by these names"
    assert gpu_loops.losses(found, is_whole) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("instructions", 0.03),
        ("whole", 0.1),
        ("programs", -1),
        ("barriers", 1),
        ("round_trips", 1),
        ("narrow", 1),
        ("in_flight", -16),
    ],
)
def test_a_worse_number_is_named_and_a_better_one_is_not(name: str, change: float) -> None:
    record = dict.fromkeys(gpu_loops.Loops.__dataclass_fields__, 5.0)
    assert gpu_loops.worse(record, record) == []
    assert gpu_loops.worse(record, {**record, name: 5 - change}) == []
    assert gpu_loops.worse(record, {**record, name: 5 + change}) == [f"{name} 5 -> {5 + change:g}"]


def test_a_loop_is_counted_from_machine_code() -> None:
    """Two trips of four rows of 32 vectors of 32 weights; what follows the end of the code is no part of it."""
    opcodes = ["S2R R0", "LDG.E.128 R4", "LDG.E.U16 R8", "STS [R1]", "BAR.SYNC 0x0", "LDS R9", "FFMA R2", "NOP"]
    lines = [f"        /*{16 * index:04x}*/                   {one} ;" for index, one in enumerate(opcodes)]
    lines.insert(1, ".L_x_0:")
    lines += ["        /*0090*/              @!P0 BRA `(.L_x_0) ;", "        /*00a0*/                   EXIT ;"]
    lines += [
        ".L_x_1:",
        "        /*00b0*/                   BRA `(.L_x_1);",
        "        /*00c0*/                   NOP ;",
    ]
    trip = gpu_loops.Trip(weights=4096, nbytes=2368, count=2, programs=3168)
    loops = gpu_loops.loops_of("\n".join(lines), trip, registers=81, shared=16, warps=1)
    assert loops == gpu_loops.Loops(
        instructions=round(7 * 32 / 4096, 2),
        whole=round((9 + 7) * 32 / 8192, 2),
        registers=81,
        shared=16,
        programs=20,
        waves=1.2,
        barriers=1,
        round_trips=1,
        narrow=1,
        wide=1,
        in_flight=20 * 2368,
    )


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [(32, 0, 1, 32), (72, 0, 1, 28), (139, 0, 4, 3), (155, 0, 4, 3), (32, 48 << 10, 4, 4), (30, 16, 4, 16)],
)
def test_programs_of_a_multiprocessor(registers: int, shared: int, warps: int, programs: int) -> None:
    assert gpu_loops.programs_at_once(registers, shared, warps) == programs
