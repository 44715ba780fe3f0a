"""Compiles every Triton kernel for GPUs that are not there, down to machine code, and says what came of it.

    python tests/gpu_compile.py 90 [part of a case's name ...]        one line of JSON for each kernel

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


def compile_all(capability: int, *parts: str) -> Iterator[Compiled]:
    """Yield each kernel that the cases launch, compiled for GPUs of a compute capability (90 is a Hopper's).

    Args:
        parts: of names; cases whose name has one of them are compiled, or all if there are none.
    """
    import triton
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(AbsentGpu(capability))
    compile_and_launch = JITFunction.run
    found: list[tuple[str, Any]] = []

    def only_compile(self: Any, *args: object, grid: object, warmup: bool, **options: object) -> object:
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **options)
        found.append((self.__name__, kernel))
        return kernel

    JITFunction.run = only_compile
    assert not triton.knobs.runtime.interpret, "the interpreter is on: nothing would be compiled"
    seen: set[bytes] = set()
    for name, call in cases():
        if parts and not any(part in name for part in parts):
            continue
        found.clear()
        call()
        for kernel_name, kernel in found:
            if kernel.asm["cubin"] not in seen:
                seen.add(kernel.asm["cubin"])
                yield described(name, kernel_name, kernel)


def described(case: str, name: str, kernel: Any) -> Compiled:
    """Return what a compiled kernel takes."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = run(str(tools / "cuobjdump"), "-res-usage", str(cubin))
        code = run(str(tools / "nvdisasm"), "-c", str(cubin))
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    widths = {"": 4, ".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2, ".64": 8, ".128": 16}
    loads: dict[int, int] = {}
    for opcode in re.findall(r"\bLDG(?:STS)?(\.[A-Z0-9_.]+)?", code):
        sizes = [nbytes for suffix, nbytes in widths.items() if suffix and re.search(rf"{suffix}(?!\d)", opcode)]
        nbytes = max(sizes, default=4)
        loads[nbytes] = loads.get(nbytes, 0) + 1
    return Compiled(
        case=case,
        kernel=name,
        registers=used["REG"],
        stack=used["STACK"],
        shared=int(kernel.metadata.shared),
        warps=int(kernel.metadata.num_warps),
        widest_load=max(loads, default=0),
        loads=dict(sorted(loads.items())),
        instructions=len(re.findall(r"/\*[0-9a-f]{4,}\*/\s+\S", code)),
    )


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    for one in compile_all(int(sys.argv[1]), *sys.argv[2:]):
        print(json.dumps(asdict(one)), flush=True)
