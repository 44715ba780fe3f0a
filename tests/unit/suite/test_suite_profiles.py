"""Launches of a profile: their grids, the bytes of weights that each reads, and what that comes to."""

from collections.abc import Callable

import pytest
import torch
from suite.profiling import Launch, Run, recorded_step, runs_of, summed
from suite.report import launch_lines
from support.gpu_kernels import let_programs_be_few, runners_of
from support.tiny_models import TinyModel

from graphcore import Engine
from graphcore.tasks.measuring.weight_reads import step_nbytes

pytestmark = pytest.mark.thorough

STEP = [("_norm", 0), ("_dense", 4000), ("_dense", 12000)]


def runs_like(names: list[str]) -> list[Run]:
    return [Run(name, "[6]", at * 1e-6, (at + 0.5) * 1e-6) for at, name in enumerate(names)]


def test_launches_of_one_kernel_and_grid_are_told_apart_by_what_they_read() -> None:
    names = ["aten_fill", "_norm", "_dense", "_dense"] * 2
    found = summed(runs_like(names), 2, STEP)
    assert found.counts == {
        Launch("aten_fill", "[6]", None): 2,
        Launch("_norm", "[6]", None): 2,
        Launch("_dense", "[6]", 4000): 2,
        Launch("_dense", "[6]", 12000): 2,
    }
    assert found.gb_per_second(Launch("_dense", "[6]", 12000)) == pytest.approx(12000 / 0.5e-6 / 1e9)
    assert "_dense[6]" in found.line()
    assert " at 24 GB/s" in found.line()


@pytest.mark.parametrize("names", [["_norm", "_dense"] * 2, ["_dense", "_norm", "_dense"] * 2])
def test_bytes_are_left_out_where_other_launches_ran_than_were_recorded(names: list[str]) -> None:
    assert {launch.nbytes for launch in summed(runs_like(names), 2, STEP).counts} == {None}


def test_grids_come_from_the_trace_and_only_what_ran_on_the_device_counts() -> None:
    events = [
        {"cat": "kernel", "name": "_dense", "ts": 5.0, "dur": 2.0, "args": {"grid": [96, 1, 1]}},
        {"cat": "kernel", "name": "_attend", "ts": 1.0, "dur": 2.0, "args": {"grid": [33, 8, 1]}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 8.0, "dur": 1.0, "args": {"bytes": 4}},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9.0, "args": {}},
    ]
    found = runs_of(events)
    assert [(run.name, run.grid) for run in found] == [("_attend", "[33 x 8]"), ("_dense", "[96]"), ("Memcpy DtoH", "")]
    assert found[0].end - found[0].begin == pytest.approx(2e-6)


@pytest.mark.parametrize(("name", "batch"), [("llama3", 1), ("gpt_oss", 1), ("gpt_oss", 3)])
def test_the_launches_of_a_step_read_the_bytes_that_the_step_reads(
    name: str,
    batch: int,
    load_tiny: Callable[[str, str], Engine],
    tiny_model: Callable[[str], TinyModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_programs_be_few(monkeypatch)
    runner = runners_of(load_tiny(name, "eager"), batch).device
    launches = recorded_step(runner, batch)
    decoder = runner.builder.decoder
    table = step_nbytes(decoder, batch) - sum(nbytes for _, nbytes in launches)
    dim = decoder.spec.dim
    assert table == batch * dim * 4, "all but the embedding table's rows, which no kernel of graphcore's gathers"
    products = [nbytes for kernel, nbytes in launches if kernel == "_dense_product"]
    assert products[-1] == decoder.spec.vocab * dim * 4, "the head"


def test_the_report_has_a_table_of_launches() -> None:
    profile = summed(runs_like(["_norm", "_dense", "_dense"]), 1, STEP).record()
    lines = launch_lines({"name": "decode", "details": {"profile": profile}})
    assert any(line.startswith("| _dense | [6] | 1 | 0.50 | 12,000 | 24 | ") for line in lines)
    assert any(line.startswith("| _norm | [6] | 1 | 0.50 |  |  | ") for line in lines)
    assert launch_lines({"name": "decode", "details": {}}) == []


def test_recording_ends_with_its_block(load_tiny: Callable[[str, str], Engine]) -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    before = JITFunction.run, InterpretedFunction.run
    recorded_step(runners_of(load_tiny("llama3", "eager"), 1).eager, 1)
    assert (JITFunction.run, InterpretedFunction.run) == before
    assert torch.is_inference_mode_enabled() is False
