"""task=perplexity against transformers: the same windows, logits in float64, sums by numpy."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from support.chat_folders import TINY
from support.task_runs import RunTask
from support.tiny_models import TinyModel, add_tokenizer, save_tiny

TEXT = (
    "The river had been low all summer, and the boats lay on the mud like old shoes. Nobody in the village spoke of "
    "rain any more; they spoke of the mill, of the price of eggs, and of the stranger who measured the bridge."
)
END = 0  # the tiny tokenizer's special token, its BOS where it has one


@pytest.fixture(scope="session")
def scored_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], TinyModel]:
    """A function from a family, and whether texts begin with a BOS, to a tiny model with a tokenizer."""

    @cache
    def make(family: str, adds_bos: bool) -> TinyModel:
        folder = tmp_path_factory.mktemp(family)
        tiny = save_tiny(family, folder)
        add_tokenizer(folder, adds_bos)
        return tiny

    return make


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def window_losses(tiny: TinyModel, window: int, stride: int, adds_bos: bool) -> list[np.ndarray]:
    """Return the losses of each window's new tokens, from transformers' logits in float64."""
    ids = [ord(character) - 31 for character in TEXT]  # a token per printable character, the space being 1
    prefix = [END] if adds_bos else []
    losses: list[np.ndarray] = []
    done = 0 if adds_bos else 1
    for begin in range(0, len(ids), stride):
        row = prefix + ids[begin : begin + window - len(prefix)]
        logits = tiny.logits_of(torch.tensor([row]))[0].double().numpy()
        surprise = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(row)), np.roll(row, -1)]
        end = begin + len(row) - len(prefix)
        new = end - done
        losses.append(surprise[:-1][-new:])
        done = end
        if end == len(ids):
            break
    return losses


@pytest.mark.parametrize(
    ("family", "adds_bos", "path"),
    [("llama3", True, "prefill"), ("llama3", False, "decode"), ("gemma3", True, "decode"), ("gpt2", False, "prefill")],
)
def test_perplexity_is_that_of_transformers(
    run_task: RunTask,
    scored_model: Callable[[str, bool], TinyModel],
    text_file: Path,
    family: str,
    adds_bos: bool,
    path: str,
) -> None:
    tiny = scored_model(family, adds_bos)
    asked = (f"model.checkpoint={tiny.folder}", f"task.text={text_file}", "task.window=40", "task.stride=24")
    run = run_task("task=perplexity", *asked, f"task.path={path}", "dtype=fp32", "prefill_chunk=16")
    losses = window_losses(tiny, 40, 24, adds_bos)
    every = np.concatenate(losses)
    record = run.record
    assert (run.status, record["status"], record["path"]) == (0, "ok", path)
    assert record["prefix_ids"] == ([END] if adds_bos else [])
    assert record["text_tokens"] == record["text_bytes"] == len(TEXT)
    assert record["tokens"] == len(every) == len(TEXT) - (not adds_bos)
    assert record["windows"] == len(losses) > 5
    assert record["nll_mean"] == pytest.approx(every.mean(), abs=2e-6)
    assert record["perplexity"] == pytest.approx(np.exp(every.mean()), rel=5e-6)
    assert record["bits_per_token"] == pytest.approx(every.mean() / np.log(2), abs=3e-6)
    assert record["bits_per_byte"] == pytest.approx(every.sum() / np.log(2) / len(TEXT), abs=3e-6)
    residuals = np.array([window.sum() - every.mean() * len(window) for window in losses])
    error = math.sqrt(len(losses) / (len(losses) - 1) * (residuals**2).sum()) / len(every)
    interval = record["interval"]
    assert interval["standard_error"] == pytest.approx(error, rel=1e-4)
    assert interval["perplexity_low"] == pytest.approx(np.exp(every.mean() - 1.959964 * error), rel=1e-4)
    assert interval["perplexity_high"] == pytest.approx(np.exp(every.mean() + 1.959964 * error), rel=1e-4)


def test_the_decode_path_runs_no_prefill(
    run_task: RunTask, scored_model: Callable[[str, bool], TinyModel], text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphcore.graph.builder import GraphBuilder

    monkeypatch.setattr(GraphBuilder, "prefill", lambda self, batch: pytest.fail("prefill was built"))
    asked = (f"model.checkpoint={scored_model('llama3', False).folder}", f"task.text={text_file}", "task.window=20")
    assert run_task("task=perplexity", *asked, "task.path=decode").record["status"] == "ok"


def test_window_and_stride_have_defaults_that_fit_the_context(
    run_task: RunTask,
    scored_model: Callable[[str, bool], TinyModel],
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("task=perplexity", f"model.checkpoint={scored_model('llama3', False).folder}", f"task.text={text_file}")
    short = run_task(*asked, "context_length=30").record
    assert (short["window"], short["stride"]) == (30, 15)
    assert f"perplexity {short['perplexity']:.5g} (95 % interval" in capsys.readouterr().out
    whole = run_task(*asked).record
    assert (whole["window"], whole["stride"], whole["context_length"]) == (512, 256, 512)  # all that the model has
    assert (whole["windows"], whole["interval"]) == (1, None)
    assert whole["tokens_run"] == len(TEXT) - 1
    assert whole["tokens_per_second"] == pytest.approx(whole["tokens_run"] / whole["scoring_seconds"])
    assert "no interval from one window" in capsys.readouterr().out


@pytest.mark.slow
def test_a_long_window_gets_its_context(run_task: RunTask, chat_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("a b" * 2000, encoding="utf-8")
    asked = ("task=perplexity", f"model.checkpoint={chat_folder}", f"task.text={text}", "task.window=5000")
    record = run_task(*asked).record
    assert (record["context_length"], record["window"], record["windows"]) == (5000, 5000, 2)


def test_progress_is_told_window_by_window(
    run_task: RunTask,
    scored_model: Callable[[str, bool], TinyModel],
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = (f"model.checkpoint={scored_model('llama3', False).folder}", f"task.text={text_file}", "task.window=60")
    record = run_task("task=perplexity", *asked, "progress=true").record
    told = capsys.readouterr().err
    assert f"perplexity prefill 0/{record['windows']}" in told
    assert f"perplexity prefill {record['windows']}/{record['windows']}" in told


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "task=perplexity needs a text to score; name a UTF-8 file with task.text="),
        (["task.text=/nowhere/a.txt"], "task.text=/nowhere/a.txt cannot be read (No such file or directory)"),
        (["task.text=EMPTY"], "is empty; name a file with text in it"),
        (["task.text=BINARY"], "is not UTF-8 text (byte 0)"),
        (["task.text=SHORT"], "is too short: 1 token, with none before it"),
        (["task.text=TEXT", "task.window=1"], "task.window=1 must be at least 2"),
        (["task.text=TEXT", "task.stride=0"], "task.stride=0 must be at least 1"),
        (["task.text=TEXT", "task.window=8", "task.stride=8"], "a window moves by 1 to 7 tokens"),
        (["task.text=TEXT", "task.window=64", "context_length=32"], "64 tokens do not fit in context_length=32"),
        (["task.text=TEXT", "task.window=200000"], "context_length=200000, but the model was made for"),
        (["task.text=TEXT", "task.path=both"], "task.path=both is not one of prefill, decode"),
        (["task.text=TEXT", "prompt=a"], "prompt has no effect with task=perplexity"),
        (
            ["task.text=TEXT", "speculation=lookup"],
            "speculation=lookup has no effect with task=perplexity, which generates",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(
    run_task: RunTask, base_folder: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    contents = {"EMPTY": b"", "BINARY": b"\xff\xfe\x00", "SHORT": b"a", "TEXT": TEXT.encode()}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    placed = [
        f"task.text={tmp_path / value}" if value in contents else f"{key}={value}"
        for key, _, value in (override.partition("=") for override in overrides)
    ]
    run = run_task("task=perplexity", f"model.checkpoint={base_folder}", *placed)
    assert run.status == 1
    assert message in str(run.error)
    assert "\n" not in str(run.error)


def test_a_checkpoint_without_a_tokenizer_is_refused(run_task: RunTask, text_file: Path) -> None:
    run = run_task("task=perplexity", f"model.checkpoint={TINY / 'llama3'}", f"task.text={text_file}")
    assert "has no tokenizer, and task=perplexity scores text; choose a checkpoint with one" in str(run.error)
