"""The command line while weights stream: Ctrl-C in prefill and in decode, a disk that is full, a file that goes."""

import json
import subprocess
from pathlib import Path

import pytest
from support.processes import ROOT, run_program
from support.tiny_models import add_tokenizer, save_tiny

pytestmark = pytest.mark.thorough

# Runs run.py as a process of its own; before the given read of weights, something happens.
SCRIPT = """
import os, runpy, signal, sys, threading, atexit
from graphcore.checkpoint import streamed_file
from graphcore.streaming import thread_filler
at, what, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
whole, count = streamed_file.StreamedFile.read_into, iter(range(10**9))
def read_into(self, *given):
    if next(count) == at:
        if what in ("interrupt", "hang"):
            os.kill(os.getpid(), signal.SIGINT)
            if what == "hang":
                threading.Event().wait()  # a disk that does not answer any more
        else:
            os.truncate(path, 4096)
    return whole(self, *given)
streamed_file.StreamedFile.read_into = read_into
thread_filler.PATIENCE = 0.2
atexit.register(lambda: print([t.name for t in threading.enumerate() if "graphcore" in t.name], file=sys.stderr))
sys.argv = ["run.py", *sys.argv[4:]]
runpy.run_path("run.py", run_name="__main__")
"""
PROMPT = "abcdefghijklmnopqrstuvwxyz" * 4  # seven chunks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_tiny("llama3", path)
    add_tokenizer(path)
    return path


def run(folder: Path, at: int, what: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    """Run task=generate with weights that stream; return what it printed and result.json."""
    out = folder.parent / "out"
    command = [
        *(str(at), what, str(folder / "model.safetensors")),
        *(f"model.checkpoint={folder}", "streaming=on", "graph=eager", "device=cpu", "dtype=fp32", "chat=off"),
        *("prefill_chunk=16", "max_new_tokens=300", f"prompt={PROMPT}", f"hydra.run.dir={out}", *arguments),
    ]
    done = run_program(command, ROOT, code=SCRIPT)
    return done, json.loads((out / "result.json").read_text())


@pytest.mark.parametrize(("place", "at"), [("prefill", 8), ("decode", 500)])
def test_ctrl_c_while_weights_are_read_ends_with_status_130_and_no_threads(folder: Path, place: str, at: int) -> None:
    done, record = run(folder, at, "interrupt")
    assert done.returncode == 130, done.stderr
    assert record["status"] == "interrupted"
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip().endswith("[]"), "threads that read weights are still there"
    if place == "prefill":
        assert done.stdout.strip() == ""
    else:
        assert done.stdout.strip() != ""


def test_ctrl_c_ends_a_command_whose_disk_does_not_answer(folder: Path) -> None:
    done, record = run(folder, 500, "hang")
    assert done.returncode == 130, done.stderr
    assert record["status"] == "interrupted"
    assert "Traceback" not in done.stderr
    assert done.stderr.count("graphcore-fill") == 1, "only the thread that hangs is left"


def test_a_file_that_shrinks_in_mid_stream_is_one_line_and_status_1(folder: Path) -> None:
    done, record = run(folder, 100, "truncate")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("graphcore: ")]
    assert line.startswith(f"graphcore: CheckpointError: {folder / 'model.safetensors'}: ")
    assert "again" in line
    assert "Traceback" not in done.stderr
    assert record["status"] == "failed"
    assert record["error"].startswith("CheckpointError: ")
    assert done.stderr.rstrip().endswith("[]")


def test_an_error_after_text_begins_on_a_line_of_its_own(folder: Path) -> None:
    done, record = run(folder, 500, "truncate")
    assert record["status"] == "failed"
    assert done.stdout.strip() != ""
    assert done.stdout.endswith("\n")
