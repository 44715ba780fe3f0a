"""Every GPU kernel compiles for the GPUs that graphcore is for, keeps to its registers, and reads memory widely."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[3]
READ_LITTLE = ("_choose", "_rotate_and_write")  # a router's scores; a head of one token
# H100 and H200 with all cases; an A100 with some of each kernel: compiling is what these tests take their time for
CASES = {90: (), 80: ("Llama-3.1-8B", "Gemma 2 9B, whole", "q4_k", "mxfp4", "router", "BitNet")}


@pytest.mark.parametrize("capability", CASES)
def test_kernels_compile_without_spills_and_with_wide_loads(capability: int) -> None:
    command = [sys.executable, "-W", "ignore", str(TESTS / "gpu_compile.py"), str(capability), *CASES[capability]]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    assert [one for one in kernels if one["stack"]] == []
    assert [one for one in kernels if one["widest_load"] < 16 and one["kernel"] not in READ_LITTLE] == []
