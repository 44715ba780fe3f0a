"""Runs command lines as a shell does, each in a folder of its own, and records what they print and leave.

tests/support/processes.py runs them: a process that has imported graphcore forks for each.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from answers.cases import Case, Record
from answers.checkpoints import FILES, GOLDEN, checkpoint, helper
from answers.lines import Line, lines

ROOT = Path(__file__).parents[2]
TEXT = "A quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3
PROMPTS = (
    '{"id": "a", "prompt": "Hello", "max_new_tokens": 4}\n'
    '{"prompt_ids": [5, 6, 7, 8, 9], "temperature": 0.9, "seed": 4, "max_new_tokens": 6}\n'
    '{"messages": [{"role": "user", "content": "Name three."}], "stop": ["a"]}\n'
    '{"prompt": "Hello there, all of you", "max_new_tokens": 9, "temperature": 1.0, "top_k": 7}\n'
)
WRITTEN = {
    "prompt.txt": "What is this?",
    "text.txt": TEXT,
    "prompts.jsonl": PROMPTS,
    "bad.jsonl": '{"prompt": "Hello"}\n{"prompt": \n',
    "bad_key.jsonl": '{"promt": "Hello"}\n',
}
FRESH = ("--help", "--version", "prompt=Hello", "-m prompt=Hello seed=1,2", "promt=hi", "task=models")
# What differs between two runs of the same code: seconds, rates, dates, process numbers and free memory.
VOLATILE = (
    (re.compile(r"^\[the threads waited for a processor .*\n", re.MULTILINE), ""),  # said where neighbours are busy
    (re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d(-\d+)?"), "<date>"),
    (
        re.compile(r"(?<![\w.])\d[\d,]*(\.\d+)?\s?(ms|us|µs|min|h|s|seconds|tokens/s|tok/s|[kMGT]?i?B/s)(?![\w])"),
        "<time>",
    ),
    (re.compile(r"(?<![\w.])\d[\d,]*(\.\d+)? [GT]iB (free|available)"), "<free>"),
    (re.compile(r"\d+(\.\d+)? new tokens/s"), "<rate>"),
    (re.compile(r"\d+% of"), "<share> of"),
    (re.compile(r"(resident|peak) \d+(\.\d+)? \w+(?=,| above)"), r"\1 <size>"),  # the process's, by the kernel's pages
    (re.compile(r"\d+(\.\d+)? \w+ allowed"), "<free> allowed"),
    (re.compile(r"\d+(\.\d+)? \w+ per step"), "<size> per step"),  # what moves in a step depends on the reader's start
    (re.compile(r"longest for group \d+"), "longest for a group"),
    (re.compile(r"difference [+-]"), "difference "),
    (re.compile(r"device peak \d+(\.\d+)? \w+"), "device peak <size>"),
    (re.compile(r"( *│ *(-?\d+\.\d+)?)+ *│$", re.MULTILINE), " │ <figures> │"),  # of bench and microbench
    (re.compile(r"[ \t]+"), " "),  # columns are as wide as their figures
    (re.compile(r"[─━═\-]{3,}"), "---"),
)
UNSTEADY = re.compile(
    r"before_load|device_budget|overlap|bytes_per_token|second|rate$|bandwidth|share|queued|peak|resident_bytes|rss|free|speed|time|_ms|_us|versions|machine|process_|"
    r"percentile|latenc|started|date|run_dir|folder|pid"
)


def cases() -> Iterator[Case]:
    """Yield all lines as cases, some of a group in a row."""
    for at, line in enumerate(lines()):
        yield Case(f"commands/{line.name}", f"commands/{at // 25:02d}", partial(answer, line, False))
    for text in FRESH:
        line = Line(tuple(text.split(" ")), is_based=text not in ("--help", "--version"))
        yield Case(f"commands/run.py {line.name}", "commands/run.py", partial(answer, line, True))


def answer(line: Line, is_fresh: bool, folder: Path) -> Record:
    """Return what a line prints, its exit status, the files that it leaves, and its results.

    Args:
        is_fresh: True starts an interpreter of its own, with run.py.
    """
    key = sha256(f"{is_fresh} {line.name}".encode()).hexdigest()[:12]
    here, home = folder / "runs" / key, folder / "homes" / key
    here.mkdir(parents=True)
    cache = home / ".cache" / "graphcore"
    cache.mkdir(parents=True)
    for built in ("kernels", "compiled"):
        (cache / built).symlink_to(folder / "cache" / built)
    arguments = [re.sub("@(.+?)@", lambda found: str(_path(found[1], folder)), one) for one in line.whole]
    process = helper("support.processes")
    variables = {**process.environment(), "HOME": str(home), "COLUMNS": "100", "TERM": "dumb", "TZ": "UTC"}
    if is_fresh:
        command = [sys.executable, str(ROOT / "run.py"), *arguments]
        done = subprocess.run(command, cwd=here, env=variables, input=line.stdin, capture_output=True, text=True)
    else:
        done = process.run_program(arguments, here, line.stdin, variables=variables)
    plain = partial(_plain, folder=folder, places={str(here): "<here>", str(home): "<home>"})
    left = sorted(here.rglob("*"))
    results = [json.loads(path.read_text("utf-8")) for path in left if path.name == "result.json"]
    return {
        "status": done.returncode,
        "stdout": plain(done.stdout).splitlines(),
        "stderr": plain(done.stderr).splitlines(),
        "files": sorted({plain(str(path.relative_to(here))) for path in left if path.is_file()}),
        "results": [_steady(result, "", plain) for result in results],
    }


def _path(name: str, folder: Path) -> Path:
    """Return the path of a model, or of a file that is written at its first use."""
    if name.startswith("golden_") or name in (*FILES, "chat") or ("." not in name and name not in ODD):
        return checkpoint(name, folder)
    path = folder / "files" / name
    if not path.exists():
        made = folder / f"making-{os.getpid()}-{name}"
        _write(name, made)
        path.parent.mkdir(exist_ok=True)
        try:
            made.rename(path)
        except OSError:  # another process was faster
            assert path.exists()
    return path


ODD = ("empty", "damaged", "no_config")


def _write(name: str, path: Path) -> None:
    if name in WRITTEN:
        path.write_text(WRITTEN[name], "utf-8")
    elif name == "latin1.txt":
        path.write_bytes("déjà vu".encode("latin-1"))
    elif name == "cut.gguf":
        path.write_bytes((GOLDEN / "llama3.gguf").read_bytes()[:30000])
    else:
        path.mkdir()
        if name == "damaged":
            (path / "config.json").write_text("{", "utf-8")
        elif name == "no_config":
            (path / "model.safetensors").write_bytes((GOLDEN / "llama3" / "model.safetensors").read_bytes())


def _plain(text: str, folder: Path, places: dict[str, str]) -> str:
    """Return a text without what differs between two runs of the same code."""
    for place, name in {**places, str(folder): "<work>", str(ROOT): "<root>"}.items():
        text = text.replace(place, name)
    for pattern, name in VOLATILE:
        text = pattern.sub(name, text)
    return text


def _steady(value: Any, key: str, plain: Any) -> Any:
    """Return a value of result.json; what is measured keeps its key alone."""
    if isinstance(value, dict):
        return {name: _steady(inner, name if not UNSTEADY.search(key) else key, plain) for name, inner in value.items()}
    if isinstance(value, list):
        return [_steady(inner, key, plain) for inner in value]
    if UNSTEADY.search(key):
        return "<measured>"
    return plain(value) if isinstance(value, str) else value
