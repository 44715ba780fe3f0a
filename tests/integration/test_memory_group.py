"""Every task in a memory group smaller than its model works inside it, or is refused in one line; nothing is killed.

The kernel keeps the limit, file pages included, and says what was taken at most and whether it killed anything.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.chat_folders import save_chat_folder
from support.processes import environment
from test_streaming_budget import LLAMA_1B, Shape, random_llama

from graphcore.config.byte_sizes import parse_nbytes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from memory_group import Controller, MemoryGroup, memory_controller

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(sys.platform != "linux", reason="memory groups are Linux's")]
TEXT = "A model whose weights do not fit runs all the same. " * 8
SECONDS = 280


@dataclass(frozen=True)
class Case:
    """A model, and a group that is too small for it.

    Attributes:
        limit: bytes of the group.
        budget: bytes that a streamed run may take in it.
        weight_nbytes: of all weights in bf16.
        settings: that every run has.
    """

    folder: Path
    limit: int
    budget: int
    weight_nbytes: int
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """What came of one process."""

    status: int
    err: str
    result: dict[str, object]
    peak_nbytes: int | None
    kills: int


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    with memory_controller() as found:
        if isinstance(found, str):
            pytest.skip(f"{found}; run as root on a machine that lets processes create memory cgroups")
        yield found


def case_of(folder: Path, shape: Shape, limit: int, budget: int, *settings: str) -> Case:
    save_chat_folder(folder / "chat")
    random_llama(folder, shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "chat" / name).replace(folder / name)
    return Case(folder, limit, budget, (folder / "model.safetensors").stat().st_size, settings)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """380 MB of weights in a group of 500 MB, of which Python and torch take half."""
    shape = Shape(dim=1024, hidden=4096, layers=10, vocab=20000, heads=8, kv_heads=4)
    folder = tmp_path_factory.mktemp("small")
    return case_of(folder, shape, 500 * 10**6, 110 * 10**6, "graph=eager", "context_length=256", "prefill_chunk=64")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """2.5 GB of weights in a group of 1.5 GB."""
    return case_of(tmp_path_factory.mktemp("large"), LLAMA_1B, 1_500_000_000, 900_000_000, "context_length=1024")


def run_in_group(controller: Controller, case: Case, folder: Path, *overrides: str, stdin: str = "") -> Ended:
    command = [sys.executable, "-m", "graphcore.cli.main", f"model.checkpoint={case.folder}", "progress=false"]
    command += [f"hydra.run.dir={folder}", *case.settings, *overrides]
    group = MemoryGroup.create(controller, f"graphcore-test-{os.getpid()}-{time.monotonic_ns()}", case.limit)
    try:
        done = subprocess.run(
            group.command(command),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env=environment(),
            cwd=folder,
        )
        result = folder / "result.json"
        record = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        return Ended(done.returncode, done.stderr, record, group.peak_nbytes(), group.num_oom_kills())
    finally:
        group.remove()


STREAMED = {
    "generate": ("prompt=Hello", "max_new_tokens=3"),
    "chat": ("task=chat", "max_new_tokens=3"),
    "bench": ("task=bench", "task.prompt_tokens=16", "task.new_tokens=2", "task.repeats=1"),
    "microbench": ("task=microbench", "task.lengths=[16]", "task.repeats=1"),
    "perplexity": ("task=perplexity", "task.window=200", "task.stride=150"),
    "plan": ("task=plan",),
}


def check_streamed(controller: Controller, case: Case, folder: Path, task: str) -> None:
    overrides = list(STREAMED[task])
    if task == "perplexity":
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        overrides.append(f"task.text={folder / 'text.txt'}")
    streamed = ("streaming=auto", f"streaming.memory_budget={case.budget}")
    ended = run_in_group(controller, case, folder, *streamed, *overrides, stdin="Hello\n" if task == "chat" else "")
    assert (ended.status, ended.kills) == (0, 0), ended.err
    assert ended.result["status"] == "ok"


def check_refused(ended: Ended, case: Case, said: str) -> None:
    """Check that a run was refused in one line before any weight was read."""
    assert (ended.status, ended.kills) == (1, 0), ended.err
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith("graphcore: ")
    assert said in last
    if ended.peak_nbytes is not None:
        assert ended.peak_nbytes < case.limit - 50 * 10**6


def check_budget(controller: Controller, case: Case, folder: Path) -> None:
    """Check that a budget above what is left is refused, and that the largest that is named works."""
    asked = case.limit * 95 // 100
    ended = run_in_group(controller, case, folder, "streaming=auto", f"streaming.memory_budget={asked}", "prompt=a")
    check_refused(ended, case, "can be taken on cpu, which has")
    largest = int(ended.err.partition("the largest that works now is ")[2].split()[0]) - 4 * 10**6
    assert largest < asked
    works = (f"streaming.memory_budget={largest}", "prompt=a", "max_new_tokens=2")
    again = run_in_group(controller, case, folder, "streaming=auto", *works)
    assert (again.status, again.kills) == (0, 0), again.err


def check_pack(controller: Controller, case: Case, folder: Path) -> None:
    """Check that a model is packed in a group that it does not fit in, and that what is asked for is said."""
    bare = folder / "bare"  # without the tokenizer, which GGUF has no form for
    bare.mkdir()
    for name in ("model.safetensors", "config.json"):
        (bare / name).symlink_to(case.folder / name)
    plain = replace(case, folder=bare, settings=())  # packing runs nothing
    ended = run_in_group(controller, plain, folder, "task=pack", "quant=q8_0", f"task.output={folder / 'packed.gguf'}")
    assert (ended.status, ended.kills) == (0, 0), ended.err
    assert (folder / "packed.gguf").stat().st_size > case.weight_nbytes * 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=() if task in ("generate", "perplexity") else pytest.mark.slow) for task in STREAMED],
)
def test_a_streamed_task_stays_in_its_group(controller: Controller, small: Case, tmp_path: Path, task: str) -> None:
    check_streamed(controller, small, tmp_path, task)


def test_a_budget_above_what_the_group_can_give_is_refused(controller: Controller, small: Case, tmp_path: Path) -> None:
    check_budget(controller, small, tmp_path)


def test_a_load_that_does_not_fit_is_refused_before_it_reads(
    controller: Controller, small: Case, tmp_path: Path
) -> None:
    ended = run_in_group(controller, small, tmp_path, "streaming=off", "prompt=a")
    check_refused(ended, small, "streaming=off needs")


def test_a_model_is_packed_in_a_group_that_it_does_not_fit_in(
    controller: Controller, small: Case, tmp_path: Path
) -> None:
    check_pack(controller, small, tmp_path)


def test_a_reference_that_does_not_fit_is_refused_with_its_bytes(
    controller: Controller, small: Case, tmp_path: Path
) -> None:
    ended = run_in_group(controller, small, tmp_path, "task=verify")
    check_refused(ended, small, "task=verify runs transformers in float32 on the CPU, which takes ")
    words = "".join(ended.err.partition("which takes ")[2].split()[:2])
    needed = parse_nbytes("what verify takes", words.rstrip(","))
    assert needed is not None
    assert needed > 2 * small.weight_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("task", STREAMED)
def test_a_task_with_2_5_gb_of_weights_stays_in_1_5_gb(
    controller: Controller, large: Case, tmp_path: Path, task: str
) -> None:
    check_streamed(controller, large, tmp_path, task)


@pytest.mark.slow
def test_2_5_gb_of_weights_are_refused_or_packed_in_1_5_gb(controller: Controller, large: Case, tmp_path: Path) -> None:
    check_budget(controller, large, tmp_path)
    check_refused(run_in_group(controller, large, tmp_path, "streaming=off", "prompt=a"), large, "streaming=off needs")
    check_refused(run_in_group(controller, large, tmp_path, "task=verify"), large, "which takes ")
    check_pack(controller, large, tmp_path)
