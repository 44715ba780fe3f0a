"""cache.save and cache.load of the command line: what is saved, what is used, and what is said when it goes wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chat_folders import TINY
from support.processes import graphcore
from support.task_runs import RunTask, TaskRun

IDS = [at * 7 % 90 for at in range(70)]
LLAMA = (f"model.checkpoint={TINY / 'llama3'}", "max_new_tokens=5", "prefill_chunk=16", "context_length=128")


def asked(ids: list[int]) -> str:
    return f"prompt_ids={json.dumps(ids, separators=(',', ':'))}"


def test_a_later_run_goes_on_from_the_file_with_the_same_answer(
    run_task: RunTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.cache"
    alone = [run_task(*LLAMA, asked(ids)).record for ids in (IDS, [*IDS, 5, 6, 7])]
    saving = run_task(*LLAMA, asked(IDS), f"cache.save={file}").record
    assert saving["cache"] == {"loaded_tokens": None, "saved_tokens": 64}
    assert (saving["token_ids"], alone[0]["cache"]["saved_tokens"]) == (alone[0]["token_ids"], None)
    loading = run_task(*LLAMA, asked([*IDS, 5, 6, 7]), f"cache.load={file}").record
    assert loading["cache"] == {"loaded_tokens": 64, "saved_tokens": None}
    assert (loading["token_ids"], loading["timings"]["cached_tokens"]) == (alone[1]["token_ids"], 64)
    printed = capsys.readouterr().err
    assert f"[cache.save={file}: 64 tokens, {file.stat().st_size / 1024:.2f} KiB]" in printed
    assert "73 prompt tokens (64 of them cached)" in printed


def test_of_a_file_of_prompts_their_common_beginning_is_saved(run_task: RunTask, tmp_path: Path) -> None:
    lines, file = tmp_path / "prompts.jsonl", tmp_path / "system.cache"
    lines.write_text("".join(f'{{"prompt_ids": {[*IDS[:40], at, 9]}}}\n' for at in range(3)), "utf-8")
    record = run_task(*LLAMA, f"task.prompts_jsonl={lines}", f"cache.save={file}", "batch_size=2").record
    assert record["cache"]["saved_tokens"] == 32
    assert [each["timings"]["cached_tokens"] for each in record["generations"]] == [32] * 3
    lines.write_text(f'{{"prompt_ids": {IDS}}}\n{{"prompt_ids": {IDS[1:]}}}\n', "utf-8")
    run = run_task(*LLAMA, f"task.prompts_jsonl={lines}", f"cache.save={file}")
    assert (run.status, "the common prefix of all 2 prompts, and they have none" in str(run.error)) == (1, True)


def test_a_chat_is_saved_when_it_ends_and_goes_on_in_another(say: Callable[..., TaskRun], tmp_path: Path) -> None:
    file = tmp_path / "chat.cache"
    sizes = ("prefill_chunk=16", "context_length=256")
    first = say("what was said first\n", f"cache.save={file}", *sizes).record
    assert first["status"] == "ok"
    held = first["turns"][0]["prompt_tokens"] + first["turns"][0]["new_tokens"]
    assert held - 17 <= first["cache"]["saved_tokens"] <= held
    texts = [turn["text"] for turn in first["turns"]]
    second = say("what was said first\n", f"cache.load={file}", *sizes).record
    assert [turn["text"] for turn in second["turns"]] == texts
    assert second["turns"][0]["reused_tokens"] == first["cache"]["saved_tokens"]
    nothing = say("", f"cache.save={file}")
    assert (nothing.status, nothing.record["cache"]["saved_tokens"]) == (1, None)
    assert nothing.record["error"].endswith("nothing was said, and nothing is saved")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cache.load=none.cache", "cache.load=none.cache: no such file; name one that cache.save wrote"),
        ("cache.load=/", "cache.load=/: is no file"),
        ("cache.load=''", "cache.load= is empty"),
        ("cache.save=/", "/: is no regular file"),
        ("cache.save=/dev/null", "/dev/null: is no regular file"),
        (
            f"cache.save={Path(__file__)}",
            f"{Path(__file__)}: exists and is not a saved cache, so it is not overwritten",
        ),
        ("cache.save=/no/such/place", "cache.save=/no/such/place: there is no folder /no/such"),
        ("cache.save=short.cache", "a prompt of 3 tokens is too short to be saved"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    run_task: RunTask, override: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_task(*LLAMA, asked(IDS[:3]), override)
    assert (run.status, run.record["status"]) == (1, "failed")
    assert said in str(run.error)
    assert "\n" not in str(run.error)


@pytest.mark.parametrize("task", ["bench", "verify", "plan", "pack", "models", "perplexity", "microbench", "export"])
def test_tasks_without_prompts_refuse_the_files(run_task: RunTask, task: str, tmp_path: Path) -> None:
    own = [f"task.text={TINY / 'llama3' / 'config.json'}"] if task == "perplexity" else []
    run = run_task(f"task={task}", LLAMA[0], f"cache.save={tmp_path / 'file'}", *own)
    assert str(run.error) == f"cache.save has no effect with task={task}; leave it out"


def test_transformers_models_refuse_the_files(run_task: RunTask, tmp_path: Path) -> None:
    run = run_task(LLAMA[0], "prompt_ids=[1]", "model.fallback=transformers", f"cache.save={tmp_path / 'file'}")
    assert "cache.save is for graphcore's own architectures" in str(run.error)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["context_length=64"], "70 tokens do not fit in context_length=64; set context_length to at least 70"),
        (
            ["context_length=64", "batching.cache_tokens=32"],
            "batching.cache_tokens=32 is less: all sequences share these positions",
        ),
        (["batching.cache_tokens=48"], "70 tokens do not fit in context_length=48"),
        (["context_length=128", "cache.load=none"], "cache.load=none: no such file"),
        (["context_length=128", "cache.load=damaged"], "damaged: is not a saved cache, or is cut off"),
    ],
)
def test_on_the_command_line_it_is_one_line_and_status_1(overrides: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "damaged").write_bytes(b"\xff" * 40)
    given = ("graph=eager", "device=cpu", "progress=false", "outputs=false", "prefill_chunk=16", *LLAMA[:2])
    done = graphcore(*given, asked(IDS), *overrides, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("graphcore: ")]
    assert len(errors) == 1, done.stderr
    assert said in errors[0]
    assert "Traceback" not in done.stderr
