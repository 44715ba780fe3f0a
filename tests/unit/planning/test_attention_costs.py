"""Attention of a chunk behind a long context takes no more memory than is planned, and not much less."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphcore.device import find_cpp_compiler
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec
from graphcore.planning.workspace import attention_nbytes

pytestmark = pytest.mark.thorough

HEADS, KV_HEADS, WIDTH, TOKENS, THREADS = 8, 4, 64, 64, 2
CODE = """
import json, sys
from pathlib import Path
import torch
from graphcore.kernels.backend import TorchBackend, find_backend
from graphcore.kernels.ops.attention_parameters import AttentionParameters
context, window, is_native = json.loads(sys.argv[1])
torch.set_num_threads({threads})
backend = find_backend(torch.device("cpu"), Path.home() / ".cache" / "graphcore")[0] if is_native else TorchBackend()
def peak():
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
def pools(slots):
    return torch.ones({kv_heads} and slots // 64, {kv_heads}, 64, {width}, dtype=torch.bfloat16)
def attend(context, window):
    keys, values = pools(context), pools(context)
    table = torch.arange(context // 64, dtype=torch.int32)[None]
    query, key = (torch.ones(1, {tokens}, heads, {width}, dtype=torch.bfloat16) for heads in ({heads}, {kv_heads}))
    span = torch.tensor([context - {tokens}]), torch.tensor([{tokens}])
    how = AttentionParameters(window, 0.1, None, "", 0.0)
    return keys, lambda: backend.attend(query, key, key, (keys, values, table), span, how)
_, small = attend(1024, 0)
small()
held, large = attend(context, window)
before = peak()
with torch.inference_mode():
    large()
print(peak() - before)
"""
NUMBERS = {"threads": THREADS, "heads": HEADS, "kv_heads": KV_HEADS, "width": WIDTH, "tokens": TOKENS}


def spec_of(window: int | None) -> ModelSpec:
    norm = NormSpec("rms", 1e-5)
    attention = AttentionSpec(HEADS, KV_HEADS, WIDTH, scale=0.1, window=window)
    return ModelSpec(64, 10, (BlockSpec(64, norm, attention, MLPSpec(8, "silu")),), norm, 1 << 17)


def taken(context: int, window: int | None, is_native: bool) -> int:
    """Return the bytes by which a process grows while it attends one chunk at the end of a context."""
    command = [sys.executable, "-c", CODE.format(**NUMBERS), json.dumps([context, window or 0, is_native])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's peak from Linux's /proc")
@pytest.mark.parametrize(
    ("context", "window", "is_native"), [(1 << 16, None, True), (1 << 15, None, False), (1 << 16, 1 << 15, True)]
)
def test_attention_of_a_long_context_takes_what_is_planned(context: int, window: int | None, is_native: bool) -> None:
    if is_native and find_cpp_compiler() is None:
        pytest.skip("no C++ compiler: torch computes attention")
    threads = THREADS if is_native else None
    planned = attention_nbytes(spec_of(window), context, TOKENS, torch.bfloat16, threads)
    found = taken(context, window, is_native)
    slack = 4 << 20  # pages of libraries that are touched for the first time
    assert 0.5 * planned < found <= planned + slack
