"""docs/results.md has every field that is written, and no other."""

import io
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.chat_folders import TINY
from support.task_runs import RunTask

from graphcore.serving.running_servers import this_server
from graphcore.serving.served_model import ServedModel

DOCS = Path(__file__).parents[3] / "docs" / "results.md"
COMMON = "Every task"
RAN = "Tasks that got as far as a model"
OPEN = (
    "sampling",
    "settings",
    "versions",
    "timings",
    "quant.errors",
    "streaming.prefill",
    "llama_cpp",
)  # documented as a whole


@cache
def documented() -> dict[str, tuple[str, set[str]]]:
    """Return the text and the fields of each section, by its heading."""
    parts = re.split(r"^## (.+)$", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        heading: (text, set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)))
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def fields_of(task: str) -> set[str]:
    """Return the fields that a task's result should have."""
    fields = documented()[COMMON][1] | documented()[f"task={task}"][1]
    # "For `generate`, `chat` ...": which of the section's tables apply
    tables = re.split(r"^(?=.*[Ff]or `)", documented()[RAN][0], flags=re.MULTILINE)
    for table in tables:
        applies = f"`{task}`" in table.partition("\n")[0]
        fields |= set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) if applies else set()
    return fields


def written(record: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the fields of a record in the document's notation."""
    for key, value in record.items():
        name = prefix + key
        if isinstance(value, dict) and name not in OPEN:
            yield from written(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from written(value[0], f"{name}[].")
        else:
            yield name


RUNS = {
    "generate": [
        *("prompt_ids=[1,2]", "max_new_tokens=2", "task.logprobs=true"),
        *("graph=captured", "speculation=lookup"),
    ],
    "chat": ["max_new_tokens=2"],
    "bench": ["task.prompt_tokens=3", "task.new_tokens=2", "task.repeats=1"],
    "microbench": ["task.lengths=[3]", "task.repeats=1"],
    "verify": ["task.tokens=4", "task.new_tokens=2", "dtype=bf16"],
    "plan": ["task.disk=1GB", "task.bandwidth=10GB", "graph=captured", "streaming=on", "speculation=self"],
    "perplexity": ["task.window=8"],
    "pack": ["quant=q8_0"],
    "export": ["graph=compiled"],
    "doctor": [],
    "runs": ["task.prune=30d"],
    "ps": [],
    "models": ["task.remove=one.gguf", "task.confirmed=true"],
    "serve": ["task.port=0", "task.max_sequences=1"],
}

SLOW = {"export": pytest.mark.slow}  # compiles for a minute


def end_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server end when its model is loaded, as a signal does."""
    load = ServedModel.load

    async def load_and_end(served: ServedModel, prepare: Callable[[], None]) -> None:
        await load(served, prepare)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ServedModel, "load", load_and_end)


@pytest.mark.thorough
@pytest.mark.parametrize("task", [pytest.param(task, marks=SLOW.get(task, ())) for task in RUNS])
def test_every_field_of_a_task_is_documented_and_every_documented_one_is_there(
    run_task: RunTask, chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    folder = chat_folder if task in ("chat", "perplexity") else TINY / "llama3"
    text = tmp_path / "text.txt"
    text.write_text("the sun rose, and the sea was still", encoding="utf-8")
    own = [f"task.text={text}"] if task == "perplexity" else []
    own += [f"task.output={tmp_path / 'packed.gguf'}"] if task == "pack" else []
    own += [f"task.output={tmp_path / 'artefacts'}"] if task == "export" else []
    if task == "serve":
        end_after_loading(monkeypatch)
    if task == "runs":
        (tmp_path / "2999-01-31/12-00-00-000001/.hydra").mkdir(parents=True)
        own.append(f"task.folder={tmp_path}")
    if task == "ps":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        this_server("mine", "http://127.0.0.1:1", 0.0).write()
    if task == "models":
        own.append(f"cache_dir={tmp_path}")
        (tmp_path / "benchmarks").mkdir()
        for name in ("one.gguf", "two.gguf"):
            (tmp_path / "benchmarks" / name).write_bytes(b"GGUF")
    run = run_task(f"task={task}", f"model.checkpoint={folder}", *RUNS[task], *own)
    assert run.status == 0
    assert set(written(run.record)) == fields_of(task)


def test_a_failed_run_has_the_fields_of_every_task(run_task: RunTask) -> None:
    run = run_task("model.checkpoint=/nowhere")
    assert set(written(run.record)) == documented()[COMMON][1]


def test_every_task_is_documented() -> None:
    from graphcore.tasks.registry import NAMES

    assert RUNS.keys() == set(NAMES)
    assert {f"task={name}" for name in NAMES} <= documented().keys()
