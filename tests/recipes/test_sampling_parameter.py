"""A sampling parameter is a field of a table: added as CONTRIBUTING.md says, it is checked and drawn with everywhere.

The parameter is min-p's sister in logarithms: `max_gap` keeps what `min_p=exp(-max_gap)` keeps.
"""

import json
from importlib.util import find_spec

import pytest
from checkout import Checkout, Edits

from graphcore.kernels.cpu.library import can_have_kernels

pytestmark = pytest.mark.thorough

TITLE = "A sampling parameter"
SECONDS = 590  # the kernels are built
FIELD = '    max_gap: float = _parameter(0.0, "0 (off) or more", 0, beside_greedy=(0,))\n'
STATEMENT = """    if draw.params.max_gap > 0:
        weights = weights.masked_fill(weights < weight_of(-_rounded(draw.params.max_gap, logits)), 0.0)
"""
BY_GPU = """        gap = tl.load(numbers + MAX_GAP)
        is_kept &= weights >= tl.where(gap > 0.0, sampling_weight(-gap), 0.0)
"""
LEAST = "const FloatPart gap = row.params.max_gap > 0 ? weight_of(splat(-row.params.max_gap)) : splat(0.0f);\n    "
DEFAULT = "max_gap: 0.0 # keep tokens whose logits, divided by the temperature, are at most this far from the highest\n"
PACKAGE: Edits = {
    "graphcore/sampling_params.py": (("    repetition_penalty: float = _parameter", FIELD),),
    "graphcore/config/settings.py": (
        ("    repetition_penalty: float | None = MISSING", "    max_gap: float | None = MISSING\n"),
    ),
    "graphcore/kernels/ops/draw.py": (("    return weights.masked_fill(weights < _rounded(", STATEMENT),),
    "graphcore/kernels/cpu/native/draw.cpp": (
        ("const FloatPart min_p = ", LEAST),
        ("(weights >= min_p);", "(weights >= gap) & "),
    ),
    "graphcore/kernels/gpu/sampling/drawn.py": (
        ("    MIN_P,\n", "    column_of,\n"),
        ("import MOST_FLOAT,", "import sampling_weight\nfrom graphcore.kernels.gpu.sampling.weights_and_noise "),
        ("@triton.jit\ndef _penalise", 'MAX_GAP = column_of("max_gap")\n\n\n'),
        ("        if HAS_TOP_K_TOP_P:", BY_GPU),
    ),
}
CONF: Edits = {f"conf/sampling/{name}.yaml": (("repetition_penalty:", DEFAULT),) for name in ("greedy", "nucleus")}
CONF["conf/sampling/auto.yaml"] = (("repetition_penalty:", DEFAULT.replace("0.0", "null")),)
SETUP = """
import json, math, os, sys
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run on the CPU
from pathlib import Path
import torch
from graphcore.kernels.ops.draw import Draw, DrawKernel, choose_tokens
from graphcore.sampling_params import SamplingParams
logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(0)) * 2
def draws(**values):
    return [Draw(SamplingParams(2.0, seed=row, **values), position=1 + row) for row in range(len(logits))]
gaps = draws(max_gap=1.5)
stated = choose_tokens(logits, gaps)
"""
BY_TORCH = """
alike = choose_tokens(logits, draws(min_p=math.exp(-1.5)))
print(json.dumps([stated == alike, stated == choose_tokens(logits, draws())]))
"""
BY_CPU = """
from graphcore.kernels.cpu.library import build_library
library = build_library(Path({cache!r}), ("-O0",))
print(json.dumps(DrawKernel(str(library), 2).choose(logits, gaps) == stated))
"""
ON_GPU = """
from graphcore.graph.gpu.sampling import RowSettings, SamplingBuffers, choose_step
from graphcore.graph.state import StepState
choosing, state = SamplingBuffers.allocate(16, 300, torch.device("cpu")), StepState.empty(16, 1, torch.device("cpu"))
for row, draw in enumerate(gaps):
    choosing.put(row, RowSettings(params=draw.params))
state.put_rows([[0]] * 16, [draw.position - 1 for draw in gaps])
state.logits, state.chosen = logits, torch.zeros(16, dtype=torch.int64)
choose_step(state, choosing, "sample").replay()
print(json.dumps(state.chosen.tolist() == stated))
"""


@pytest.fixture
def extended(checkout: Checkout) -> Checkout:
    checkout.edit(TITLE, PACKAGE | CONF)
    checkout.python(
        "from runpy import run_module; run_module('graphcore.kernels.cpu.native_header', run_name='__main__')"
    )
    return checkout


def test_a_parameter_touches_five_files_of_the_package() -> None:
    assert len(PACKAGE) == 5


def test_a_parameter_is_checked_like_the_others_wherever_it_is_given(extended: Checkout) -> None:
    for value, message in (
        ("-1", "=-1.0 must be 0 (off) or more"),
        ("2 sampling.temperature=0", "=2.0 has no effect with sampling.temp"),
    ):
        done = extended.run("prompt=a", *f"sampling.max_gap={value}".split())
        assert done.status == 1
        assert f"sampling.max_gap{message}" in done.error
    code = """
from graphcore.engine.arguments import sampling_params
from graphcore.errors import ConfigError
from graphcore.tasks.chat.slash_commands import COMMANDS
print(*(sampling_params({"temperature": heat, "max_gap": 2}).max_gap for heat in (0.5, 0)))
print("max_gap" in COMMANDS["set"].does)
try:
    sampling_params({"max_gap": 2})
except ConfigError as error:
    print(error)
"""
    first, known, error = extended.python(code).splitlines()
    assert (first, known) == ("2 0.0", "True")
    assert "sampling.max_gap=2 has no effect" in error


def test_torch_keeps_what_the_parameter_says(extended: Checkout) -> None:
    assert json.loads(extended.python(SETUP + BY_TORCH)) == [True, False]


@pytest.mark.skipif(not can_have_kernels(), reason="needs a C++ compiler")
def test_the_cpus_kernel_chooses_the_same_tokens(extended: Checkout) -> None:
    assert extended.python(SETUP + BY_CPU.format(cache=str(extended.cache)), seconds=SECONDS).strip() == "true"


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_a_gpus_kernel_chooses_the_same_tokens(extended: Checkout) -> None:
    assert extended.python(SETUP + ON_GPU).strip() == "true"
