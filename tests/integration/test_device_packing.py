"""Models whose matrices lie in planes, as a GPU has them: through Triton's interpreter, and streamed.

The same models with the file's own bytes (`StoredPacking`) are the reference; those are compared with transformers
(test_packing_at_load.py, test_packed_files.py).
"""

from pathlib import Path

import pytest
import torch
from support.chat_folders import TINY
from support.streaming import load
from torch import Tensor

from graphcore import Engine
from graphcore.graph.builder import GraphBuilder
from graphcore.kernels.backend import TorchBackend, TritonBackend
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.packed.linear import launch_packed_linear
from graphcore.kernels.gpu.packed.to_dense import launch_rows
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.nn.linear import Linear

pytestmark = pytest.mark.thorough

IDS = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]
CONTEXT = "context_length=64"
CLOSE = 2e-5  # float32, logits of order one; sums are added in another order


def hold_planes(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """Have engines on the CPU choose packings as on a GPU, or as on a machine that has no kernels."""

    backend = TritonBackend() if on_gpu else TorchBackend()
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (backend, ""))


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels in Triton's interpreter instead of what the CPU does."""
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted where there is a GPU: tests/cuda runs them there")

    def linear(self: DevicePacking, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Tensor:
        return launch_packed_linear(x, packed, bias, self, rounding == "token")

    def gather(self: DevicePacking, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        return launch_rows(ids, packed, self, dtype)

    monkeypatch.setattr(DevicePacking, "linear", linear)
    monkeypatch.setattr(DevicePacking, "gather", gather)


def logits_of(folder: Path, quant: str, tokens: int, streaming: str = "off") -> Tensor:
    with load(folder, CONTEXT, streaming=streaming, quant=quant) as engine:
        packings = {type(part.packing) for part in decoder_of(engine).modules() if isinstance(part, Linear)}
        assert len(packings & {StoredPacking, DevicePacking}) == 1, packings
        return engine.logits([IDS[:tokens]])


def decoder_of(engine: Engine) -> torch.nn.Module:
    builder = engine.runner.builder
    assert isinstance(builder, GraphBuilder)
    return builder.decoder


@pytest.mark.parametrize(
    ("name", "quant", "tokens"), [("llama3", "q8_0", 11), ("gpt2", "q4_0", 2), ("gemma3", "q5_0", 2)]
)
def test_a_whole_model_runs_through_the_kernels(
    name: str, quant: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than eight tokens are multiplied with what is unpacked."""
    hold_planes(monkeypatch, on_gpu=False)
    expected = logits_of(TINY / name, quant, tokens)
    hold_planes(monkeypatch, on_gpu=True)
    interpret(monkeypatch)
    assert (logits_of(TINY / name, quant, tokens) - expected).abs().max() < CLOSE


@pytest.mark.parametrize(("name", "quant"), [("llama3", "q8_0"), ("gpt2", "q4_1")])
def test_planes_that_stream_are_those_that_stay(name: str, quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read in conversions, heads in slices, and rows of the embedding one by one."""
    hold_planes(monkeypatch, on_gpu=True)
    assert (logits_of(TINY / name, quant, 11, "on") - logits_of(TINY / name, quant, 11)).abs().max() < 1e-6
