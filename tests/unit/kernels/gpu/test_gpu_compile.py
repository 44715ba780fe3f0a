"""Every GPU kernel compiles for the GPUs that graphcore is for, keeps to its registers, and reads memory widely."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[3]
READ_LITTLE = ("_choose", "_rotate_and_write")  # a router's scores; a head of one token
CAPABILITIES = (80, 90)  # A100 and H100 or H200


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_without_spills_and_with_wide_loads(capability: int) -> None:
    command = [sys.executable, "-W", "ignore", str(TESTS / "gpu_compile.py"), str(capability)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    assert [one for one in kernels if one["stack"]] == []
    assert [one for one in kernels if one["widest_load"] < 16 and one["kernel"] not in READ_LITTLE] == []
