"""Parts: each is there, ends within its time, and takes nobody with it when it dies."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from suite import correctness
from suite.part_process import LOG, run_process
from suite.profiling import Run, short, summed
from suite.registry import ALL, CALL_SECONDS, CALLS, ENDING, EXTRA, INSTALLING, PARTS
from suite.shapes import TINY, TRUE, model_overrides

from graphcore.config.compose import compose_settings

pytestmark = pytest.mark.thorough

EIGHT_MINUTES = 480
FIVE_MINUTES = 300


@pytest.mark.parametrize("number", CALLS)
def test_a_call_fits_into_five_minutes_by_its_estimates_with_its_beginning_and_end(number: int) -> None:
    seconds = [PARTS[name].seconds for name in CALLS[number]]
    assert INSTALLING + sum(seconds) + ENDING <= FIVE_MINUTES
    assert CALL_SECONDS <= FIVE_MINUTES
    # The command starts each part of a call whose estimates hold: what is left when the last one begins is enough.
    assert seconds[-1] <= CALL_SECONDS - INSTALLING - sum(seconds[:-1]) - ENDING


def test_every_part_is_in_one_call_or_is_named_as_extra() -> None:
    named = [name for names in (*CALLS.values(), EXTRA) for name in names]
    assert sorted(named) == sorted(part.name for part in ALL)


@pytest.mark.parametrize("part", ALL, ids=lambda part: part.name)
def test_every_part_names_a_function_and_fits_into_eight_minutes(part) -> None:
    module, _, function = part.run.partition(":")
    assert callable(getattr(importlib.import_module(f"suite.{module}"), function))
    assert 0 < part.seconds < part.limit < EIGHT_MINUTES
    assert PARTS[part.name] is part


def run(folder: Path, code: str, limit: float = 30) -> str:
    return run_process([sys.executable, "-c", code], folder / LOG, limit)


def test_a_process_that_ends_well_is_ok_and_its_output_is_kept(tmp_path: Path) -> None:
    assert run(tmp_path, "print('hello')") == "ok"
    assert "hello" in (tmp_path / LOG).read_text(encoding="utf-8")


def test_a_process_that_dies_says_its_last_words_or_its_signal(tmp_path: Path) -> None:
    assert run(tmp_path, "print('before'); raise SystemExit('no such card')") == "failed: no such card"
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)") == "failed: SIGKILL (out of memory?)"
    assert run(tmp_path, "import os; os.abort()") == "failed: SIGABRT"


def test_a_process_that_takes_too_long_is_killed_with_those_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    began = time.monotonic()
    assert run(tmp_path, code, 1.5) == "killed after 2 s"
    assert time.monotonic() - began < 20
    child = int((tmp_path / LOG).read_text(encoding="utf-8").splitlines()[-1])
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    pytest.fail("what the part had started outlived it")


def is_running(process_id: int) -> bool:
    """Return whether a process is there and no zombie that waits to be reaped."""
    status = Path(f"/proc/{process_id}/stat")
    return status.exists() and status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("model", ["llama3_8b", "llama3_70b", "llama2_7b", "llama_30b", "gpt_oss", "bitnet"])
def test_true_shapes_are_the_groups_own_and_tiny_ones_take_their_place(model: str) -> None:
    true = compose_settings(model_overrides(model, "random:q4_k", False)).model
    assert true.checkpoint == "random:q4_k"
    assert true.random_config["hidden_size"] >= 2560
    tiny = compose_settings(model_overrides(model, "random:q4_k", True)).model.random_config
    assert tiny["hidden_size"] == TINY["llama"]["hidden_size"]
    assert TRUE.depths[-1] + 64 <= TRUE.context


def test_a_profile_says_who_takes_the_time_and_how_much_nobody_does() -> None:
    runs = [
        Run("void gemv<4>(int)", "[8 x 2]", 0.0, 60e-6),
        Run("_norm", "[1]", 60e-6, 70e-6),
        Run("Memcpy HtoD (Pinned -> Device)", "", 20e-6, 30e-6),
        Run("_norm", "[1]", 90e-6, 100e-6),
    ]
    assert summed(runs, 2).line() == (
        "gemv[8 x 2] 60% (x0), _norm[1] 20% (x1), Memcpy HtoD 10% (x0), other kernels 0%, none running 20%; "
        "2 kernels and 50 us a step"
    )
    assert short("at::native::elementwise_kernel<128>") == "elementwise_kernel"
    assert "no kernel" in summed([], 1).line()


def test_every_test_that_needs_a_gpu_is_in_one_part() -> None:
    named = correctness.files(*correctness.MODELS, *correctness.IDLE_CARD)
    assert sorted(named) == sorted(map(str, correctness.TESTS.glob("test_*.py")))
    assert correctness.KERNELS.is_dir()
