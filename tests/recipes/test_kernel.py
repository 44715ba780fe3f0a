"""An operation is a statement, an instruction and a kernel: added as CONTRIBUTING.md says, they compute the same."""

import json
from importlib.util import find_spec

import pytest
from checkout import Checkout, Edits

from graphcore.kernels.cpu.library import can_have_kernels

pytestmark = pytest.mark.slow

TITLE = "An operation"
SECONDS = 500  # the kernels are built
FUNCTION = '''def softsign(x: Tensor) -> Tensor:
    """Return x / (1 + |x|), elementwise."""
    return x / (1 + x.abs())
'''
WRAPPER = '''def softsign_elements(a: Tensor) -> Tensor:
    """Return a / (1 + |a|), of a's shape and dtype."""
    out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    torch.ops.graphcore.gpu_elementwise.default(out, a, None, "softsign", "", 1.0)
    return out
'''
SIGN = "case Elements::SOFTSIGN: return x / (splat(1.0f) + (x < splat(0.0f) ? -x : x));"
ENTRY = (
    'softsign: lambda recorder, node, x: recorder.elementwise("softsign", x, None, recorder.out(node, x.shape[-1])),'
)

METHOD = '''    def softsign(self, x: Tensor) -> Tensor:
        """Return x / (1 + |x|)."""
        return softsign_elements(x)

'''

STATEMENT: Edits = {
    "graphcore/nn/mlp.py": (("class ActivationModule", f"{FUNCTION}\n\n"),),
    "graphcore/graph/lowering/shapes.py": (
        ("from graphcore.nn.mlp import", "from graphcore.nn.mlp import softsign\n"),
        ("without_padding)  #", "softsign, "),
    ),
}
INSTRUCTION: Edits = {
    "graphcore/kernels/cpu/instructions.py": (('"scale": 3}', '"softsign": 4, '),),
    "graphcore/kernels/cpu/native/step.h": (("SCALE = 3 }", "SOFTSIGN = 4, "),),
    "graphcore/kernels/cpu/native/step.cpp": (("case Elements::GATE:", f"{SIGN}\n        "),),
    "graphcore/graph/cpu/instruction_entries.py": (
        ("from graphcore.nn.mlp import", "from graphcore.nn.mlp import softsign\n"),
        ("capped: ModuleRecorder", f"{ENTRY}\n    "),
    ),
}
KERNEL: Edits = {
    "graphcore/kernels/gpu/elementwise.py": (
        ("@triton.jit", f"{WRAPPER}\n\n"),
        ("    else:\n        tl.static_assert", '    elif ELEMENTS == "softsign":\n        x = x / (1 + tl.abs(x))\n'),
    ),
    "graphcore/graph/gpu/kernel_obstacles.py": (
        ("from graphcore.nn.mlp import", "from graphcore.nn.mlp import softsign\n"),
        ("    capped: KernelEntry", '    softsign: KernelEntry("softsign"),\n'),
    ),
    "graphcore/graph/gpu/kernel_entries.py": (
        ("from graphcore.kernels.gpu.elementwise", "from graphcore.kernels.gpu.elementwise import softsign_elements\n"),
        ("    def capped(self", METHOD),
    ),
}
MODULE = """
import json, os
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run on the CPU
from pathlib import Path
import torch
from torch import nn
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import softsign

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (Linear(*sizes, bias=False, dtype=torch.float32) for sizes in ((64, 33), (33, 64)))
        for index, one in enumerate((self.up, self.down)):
            one.weight = torch.randn(one.weight.shape, generator=torch.Generator().manual_seed(index)) / 8

    def forward(self, x):
        return x + self.down(softsign(self.up(x)))

toy, stream = Toy(), torch.linspace(-3, 3, 64)
expected = toy(stream)
"""
OBSTACLES = """
from graphcore.graph.cpu.instruction_entries import obstacle_of_operations
from graphcore.graph.gpu.kernel_obstacles import block_obstacle
print(json.dumps([obstacle_of_operations(toy, changes_x=True), block_obstacle(toy, 1)]))
"""
BY_INSTRUCTIONS = """
from graphcore.graph.cpu.instruction_entries import ModuleRecorder
from graphcore.graph.lowering.targets import lower_to_instructions
from graphcore.graph.state import StepState
from graphcore.kernels.cpu.library import build_library
from graphcore.kernels.cpu.program import NativeProgram
program = NativeProgram(str(build_library(Path({cache!r}), ("-O0",))), 2)
x = program.buffer(64)
recorder = ModuleRecorder(program, StepState.empty(1, 1, torch.device("cpu")), dict(toy.named_modules()))
assert recorder.record(lower_to_instructions(toy), dict(x=x)) is x
x.copy_(stream)
program.run()
print((x - expected).abs().max().item())
"""
BY_KERNELS = """
from graphcore.graph.gpu.kernel_entries import DeviceRun
from graphcore.graph.lowering.targets import lower_to_kernels
found = DeviceRun(dict(toy.named_modules())).run(lower_to_kernels(toy), dict(x=stream.clone()[None]))
print((found[0] - expected).abs().max().item())
"""
CLOSE = 1e-5  # float32, two orders of summation


def obstacles(checkout: Checkout) -> list[str | None]:
    found: list[str | None] = json.loads(checkout.python(MODULE + OBSTACLES))
    return found


def test_what_has_no_entry_yet_is_refused_by_name(checkout: Checkout) -> None:
    checkout.edit(TITLE, STATEMENT)
    assert obstacles(checkout) == ["no native instruction for softsign", "no GPU kernel for softsign"]


@pytest.mark.skipif(not can_have_kernels(), reason="needs a C++ compiler")
def test_an_operation_runs_in_a_native_program(checkout: Checkout) -> None:
    checkout.edit(TITLE, STATEMENT | INSTRUCTION)
    assert obstacles(checkout)[0] is None
    code = MODULE + BY_INSTRUCTIONS.format(cache=str(checkout.cache))
    assert float(checkout.python(code, seconds=SECONDS)) < CLOSE


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_an_operation_runs_as_a_kernel(checkout: Checkout) -> None:
    checkout.edit(TITLE, STATEMENT | KERNEL)
    assert obstacles(checkout)[1] is None
    assert float(checkout.python(MODULE + BY_KERNELS)) < CLOSE
