"""Compiles every Triton kernel for GPUs that are not there, down to machine code, and says what came of it.

    python tests/gpu_compile.py 90 [part of a case's name ...]        one line of JSON for each kernel
    python tests/gpu_compile.py 90 --each [part ...]                  the first case of each kernel, too
    python tests/gpu_compile.py table [--write] [part ...]            what the loops cost an H100 (gpu_loops.py)

A case calls a kernel's wrapper with tensors on the meta device; the launch is left out. Triton specialises on what it
is given (dtypes, alignment, integers that are 1 or multiples of 16), so shapes are those of real models. This runs in
a process of its own, because Triton decides at its import whether kernels are interpreted.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_loops

FOLDER = Path(__file__).parent / "unit" / "kernels" / "gpu"
Case = tuple[str, Callable[[], object]]


@dataclass(frozen=True)
class Compiled:
    """One kernel as a GPU would run it.

    Attributes:
        case: what was called.
        registers: of a thread.  stack: bytes of a thread that do not fit in registers.  shared: bytes of a block.
        warps: of a block.
        widest_load: bytes that one instruction of a thread reads from global memory, at most; copies to shared memory
            that no register sees count too.
        loads: how many such instructions there are, by their bytes.
        instructions: of machine code in all.
        early: what a dependent launch does in memory before it waits for earlier kernels; None for other launches.
        loops: what the loops of one token's product cost an H100; None for other kernels, and for other GPUs.
    """

    case: str
    kernel: str
    registers: int
    stack: int
    shared: int
    warps: int
    widest_load: int
    loads: dict[int, int]
    instructions: int
    early: list[str] | None
    loops: gpu_loops.Loops | None


class AbsentGpu:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> object:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def cases() -> Iterator[Case]:
    """Yield the cases of all files `*_gpu_cases.py`."""
    sys.path.insert(0, str(FOLDER))
    for path in sorted(FOLDER.glob("*_gpu_cases.py")):
        for name, call in importlib.import_module(path.stem).cases():
            yield f"{path.stem.removesuffix('_gpu_cases')}: {name}", call


def first_cases() -> Iterator[str]:
    """Yield the names of the cases that are the first to launch a kernel; nothing is compiled."""
    from triton.runtime.jit import JITFunction

    known: set[str] = set()
    launched: set[str] = set()
    compile_and_launch = JITFunction.run
    JITFunction.run = lambda self, *_args, **_options: launched.add(self.__name__)
    for name, call in cases():
        launched.clear()
        call()
        if launched - known:
            yield name
        known |= launched
    JITFunction.run = compile_and_launch


def compile_all(capability: int, *parts: str, each: bool = False) -> Iterator[Compiled]:
    """Yield each kernel that the cases launch, compiled for GPUs of a compute capability (90 is a Hopper's).

    Args:
        parts: of names; cases whose name has one of them are compiled, or all if there are none.
        each: True for the cases of `parts` and the first case of each kernel.
    """
    import torch
    import triton
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from graphcore.kernels.gpu import pdl

    driver.set_active(AbsentGpu(capability))
    torch.cuda.get_device_capability = lambda _device=None: divmod(capability, 10)  # type: ignore[assignment]
    is_whole, first = not parts and not each, set(first_cases()) if each else set[str]()
    compile_and_launch = JITFunction.run
    found: list[tuple[str, Any, gpu_loops.Trip | None]] = []

    def only_compile(self: Any, *args: object, grid: tuple[int, ...], warmup: bool, **options: object) -> object:
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **options)
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **options}
        trip = gpu_loops.trip_of(self.__name__, arguments, grid) if capability == 90 else None
        found.append((self.__name__, kernel, trip))
        return kernel

    JITFunction.run = only_compile
    assert not triton.knobs.runtime.interpret, "the interpreter is on: nothing would be compiled"
    codes: dict[bytes, Future[tuple[str, str]]] = {}
    launches = []
    with ThreadPoolExecutor(1) as beside:  # the disassembler runs while the next kernel is compiled
        for name, call in cases():
            if not (is_whole or name in first or any(part in name for part in parts)):
                continue
            found.clear()
            with pdl.dependent_launches(pdl.supports_pdl(torch.device("cuda"))):
                call()
            for kernel_name, kernel, trip in found:
                cubin = kernel.asm["cubin"]
                is_new = cubin not in codes
                if is_new:
                    codes[cubin] = beside.submit(disassembled, cubin)
                if is_new or trip is not None:
                    launches.append((name, kernel_name, kernel, trip))
        for name, kernel_name, kernel, trip in launches:
            yield described(name, kernel_name, kernel, trip, *codes[kernel.asm["cubin"]].result())


def disassembled(cubin: bytes) -> tuple[str, str]:
    """Return what a kernel's machine code takes of a GPU, and the code."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return run(str(tools / "cuobjdump"), "-res-usage", str(file)), run(
            str(tools / "nvdisasm"), "-c", "-ndf", str(file)
        )


def described(case: str, name: str, kernel: Any, trip: gpu_loops.Trip | None, usage: str, code: str) -> Compiled:
    """Return what a compiled kernel takes."""
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    loads: dict[int, int] = {}
    for opcode in re.findall(r"\bLDG(?:STS)?[A-Z0-9_.]*", code):
        nbytes = gpu_loops.load_nbytes(opcode)
        loads[nbytes] = loads.get(nbytes, 0) + 1
    if trip is not None:
        written, assembled = kernel.asm["ptx"].count("ld.global"), sum(loads.values())
        assert written >= assembled, f"{case}: the assembler unrolled a loop, {written} loads became {assembled}"
    shared, warps = int(kernel.metadata.shared), int(kernel.metadata.num_warps)
    return Compiled(
        case=case,
        kernel=name,
        registers=used["REG"],
        stack=used["STACK"],
        shared=shared,
        warps=warps,
        widest_load=max(loads, default=0),
        loads=dict(sorted(loads.items())),
        instructions=len(re.findall(r"/\*[0-9a-f]{4,}\*/\s+\S", code)),
        early=early_work(code) if kernel.metadata.launch_pdl else None,
        loops=trip and gpu_loops.loops_of(code, trip, used["REG"], shared, warps),
    )


def early_work(code: str) -> list[str]:
    """Return the instructions of machine code that touch global memory, or end a program, before ACQBULK waits."""
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+)", code)
    assert "ACQBULK" in opcodes, "a dependent launch that waits for nothing"
    return [one for one in opcodes[: opcodes.index("ACQBULK")] if re.match("LDG|STG|ATOM|RED|CCTL|EXIT", one)]


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def table(*words: str) -> int:
    """Print the table of loops and what is worse than its records, or record it; return the exit status."""
    parts = [word for word in words if word != "--write"]
    compiled = compile_all(90, *(parts or gpu_loops.CASES))
    found = {gpu_loops.launch_name(one.case, one.kernel): one.loops for one in compiled if one.loops is not None}
    print(gpu_loops.as_table(found))
    numbers = {name: asdict(loops) for name, loops in found.items()}
    if "--write" in words:
        gpu_loops.write(numbers, is_whole=not parts)
        return 0
    lost = gpu_loops.losses(numbers, is_whole=not parts)
    print(*lost, sep="\n")
    return bool(lost)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    if sys.argv[1] == "table":
        sys.exit(table(*sys.argv[2:]))
    words = [word for word in sys.argv[2:] if word != "--each"]
    for one in compile_all(int(sys.argv[1]), *words, each="--each" in sys.argv):
        print(json.dumps(asdict(one)), flush=True)
