"""task.output gets each answer when it is ready; a second run makes those that are missing, and no other."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chat_folders import TINY
from support.task_runs import RunTask, TaskRun

from graphcore.engine.request_handle import RequestHandle

LLAMA = f"model.checkpoint={TINY / 'llama3'}"
PROMPTS = [
    {"id": "a", "prompt_ids": [1, 2, 3]},
    {"prompt_ids": [4], "max_new_tokens": 2},
    {"id": "c", "prompt_ids": [5, 6, 7], "temperature": 1.5, "seed": 11},
    {"id": None, "prompt_ids": [12, 13], "temperature": 1.5},
    {"id": None, "prompt_ids": [14]},
]
Generate = Callable[..., TaskRun]


@pytest.fixture
def generate(run_task: RunTask, tmp_path: Path) -> Generate:
    """A function that answers lines (PROMPTS unless others are given) into answers.jsonl."""

    def run(*overrides: str, lines: list[dict[str, Any]] = PROMPTS) -> TaskRun:
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = (f"task.prompts_jsonl={tmp_path / 'prompts.jsonl'}", f"task.output={tmp_path / 'answers.jsonl'}")
        return run_task(LLAMA, "max_new_tokens=6", *files, *overrides)

    return run


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def alone(run_task: RunTask, *overrides: str) -> list[int]:
    return run_task(LLAMA, "max_new_tokens=6", *overrides).record["token_ids"]


def test_each_answer_is_that_of_its_request_alone(generate: Generate, answers: Path, run_task: RunTask) -> None:
    run = generate("batch_size=2")
    found = sorted(read(answers), key=lambda entry: entry["line"])  # they came as they were complete
    assert [{key: entry[key] for key in line} for line, entry in zip(PROMPTS, found, strict=True)] == PROMPTS
    assert [entry["line"] for entry in found] == [1, 2, 3, 4, 5]
    warm = "sampling.temperature=1.5"
    assert [entry["token_ids"] for entry in found] == [
        alone(run_task, "prompt_ids=[1,2,3]"),
        alone(run_task, "prompt_ids=[4]", "max_new_tokens=2"),
        alone(run_task, "prompt_ids=[5,6,7]", warm, "seed=11"),
        alone(run_task, "prompt_ids=[12,13]", warm, "seed=3"),  # its number in the file
        alone(run_task, "prompt_ids=[14]"),
    ]
    assert run.record["answers"] == {"path": str(answers), "there": 0, "made": 5}
    assert run.record["generations"] == []
    assert found[1]["new_tokens"] == 2
    assert found[1]["logprobs"] is None


def test_an_answer_is_in_the_file_before_its_batch_has_ended(
    generate: Generate, answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RequestHandle.result
    there: list[int] = []  # answers in the file when the next one is taken

    def watched(self: RequestHandle, timeout: float | None = None):
        there.append(len(read(answers)) if answers.exists() else 0)
        return whole(self, timeout)

    monkeypatch.setattr(RequestHandle, "result", watched)
    generate("batch_size=2", "context_length=20", lines=[{"prompt_ids": [2]}, {"prompt_ids": [1] * 19}])
    assert [entry["finish_reason"] for entry in read(answers)] == ["context", "length"]  # the shorter one first
    assert there == [0, 1]


@pytest.mark.parametrize("cut", [0, 1, 9, 40, -1])
def test_a_run_that_was_killed_goes_on_behind_its_last_whole_line(
    generate: Generate, answers: Path, cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    generate()
    whole = answers.read_bytes()
    lines = whole.splitlines(keepends=True)
    answers.write_bytes(b"".join(lines[:2]) + lines[2][:cut])  # -1: only the line break is missing
    run = generate()
    assert answers.read_bytes() == whole
    there = 3 if cut == -1 else 2
    assert run.record["answers"] == {"path": str(answers), "there": there, "made": 5 - there}
    assert f"has {there} of 5 answers" in capsys.readouterr().err


def test_nothing_is_loaded_when_all_answers_are_there(
    generate: Generate, answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate()
    whole = answers.read_bytes()
    monkeypatch.setattr("graphcore.tasks.commands.generate.load_engine", None)
    run = generate()
    assert (run.status, run.record["answers"]["made"], answers.read_bytes()) == (0, 0, whole)


def test_answers_that_are_missing_in_the_middle_are_made(generate: Generate, answers: Path) -> None:
    generate()
    whole = read(answers)
    answers.write_text("".join(json.dumps(entry) + "\n" for entry in (whole[4], whole[2])))
    generate()
    assert sorted(read(answers), key=lambda entry: entry["line"]) == whole


def test_ctrl_c_keeps_what_is_whole_and_the_next_run_makes_the_rest(
    generate: Generate, answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate()
    whole = answers.read_bytes()
    answers.unlink()
    untouched, taken = RequestHandle.result, []

    def interrupted(self: RequestHandle, timeout: float | None = None):
        taken.append(self)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return untouched(self, timeout)

    monkeypatch.setattr(RequestHandle, "result", interrupted)
    run = generate()
    assert (run.status, run.record["status"]) == (130, "interrupted")
    kept = [entry["finish_reason"] for entry in read(answers)]
    assert kept in (["length"] * 3, ["length"] * 4)  # the one that was interrupted is not there
    monkeypatch.setattr(RequestHandle, "result", untouched)
    assert generate().status == 0
    assert answers.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("my notes", "answers.jsonl:1: not a line of answers"),
        ("my notes\n", "answers.jsonl:1: not a line of answers"),
        ('{"line": 1, "id": "a", "prompt_ids": [1, 2, 3], "text": ""}\n{"id": 1}\n', "answers.jsonl:2: not a line"),
        ('{"line": 9, "id": "a", "prompt_ids": [1, 2], "text": ""}\n', r"answers.jsonl:1 answers another .*same id"),
        ('{"line": 2, "prompt_ids": [5], "text": ""}\n', r"another request than .*prompts.jsonl:2.*same number"),
    ],
)
def test_a_file_that_is_not_ours_is_left_as_it_is(generate: Generate, answers: Path, content: str, said: str) -> None:
    answers.write_text(content)
    run = generate()
    assert run.status == 1
    with pytest.raises(type(run.error), match=said):
        raise run.error
    assert answers.read_text() == content


def test_a_second_process_is_kept_out(generate: Generate, answers: Path) -> None:
    with answers.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "is being written by another process" in str(generate().error)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt_ids": [1] * 65}, r":2: 65 tokens do not fit in context_length=64"),
        ({"prompt_ids": [96]}, r":2: token id 96 is not in the vocabulary"),
        ({"prompt_ids": [1], "top_k": 3}, r":2: sampling.top_k=3 has no effect with sampling.temperature=0"),
        ({"prompt_ids": [1], "temperature": -1}, r":2: sampling.temperature=-1 must be 0 \(greedy\)"),
        ({"prompt_ids": [1], "seed": 1 << 64}, r":2: seed=18446744073709551616 must be a number of 64 bits"),
        ({"prompt": "text"}, r":2: .*has no tokenizer"),
        ({"messages": [{"role": "user", "content": "a"}]}, r":2: messages need a chat template"),
        ({"prompt_ids": [1], "stop": "x"}, r":2: stop needs a tokenizer"),
    ],
)
def test_a_request_that_cannot_run_is_named_by_its_line_before_any_runs(
    generate: Generate, answers: Path, line: dict[str, Any], said: str
) -> None:
    run = generate("context_length=64", lines=[{"prompt_ids": [1]}, line])
    with pytest.raises(type(run.error), match=said):
        raise run.error
    assert answers.read_text() == ""


def test_messages_go_through_the_template_as_chats_do(generate: Generate, answers: Path, chat_folder: Path) -> None:
    chat = [{"role": "user", "content": "hi<|end|>"}, {"role": "assistant", "content": "yes"}]
    generate(f"model.checkpoint={chat_folder}", "system=be brief", lines=[{"messages": [*chat, chat[0]]}])
    # one character is a token; <|end|> of the template is one, and of a message seven
    written = ["system:be brief", "user:hi<|end|>", "assistant:yes", "user:hi<|end|>"]
    assert read(answers)[0]["prompt_tokens"] == sum(len(text) + 2 for text in written) + len("assistant:")
    own = [{"role": "system", "content": "s"}, chat[0]]
    answers.unlink()
    run = generate(f"model.checkpoint={chat_folder}", "system=be brief", lines=[{"messages": own}])
    assert "prompts.jsonl:1: system=... and the messages' own system message are both given" in str(run.error)


def test_neutral_cuts_go_with_temperature_zero(generate: Generate, answers: Path, run_task: RunTask) -> None:
    lines = [{"prompt_ids": [4], "temperature": 0}, {"prompt_ids": [4], "temperature": 0, "top_p": 0.9, "top_k": 40}]
    generate("sampling=nucleus", lines=lines)
    assert [answer["token_ids"] for answer in read(answers)] == [alone(run_task, "prompt_ids=[4]")] * 2


def test_an_output_needs_a_file_of_prompts_that_is_another(run_task: RunTask, tmp_path: Path) -> None:
    assert "needs task.prompts_jsonl" in str(run_task(LLAMA, "task.output=a.jsonl").error)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_ids": [1]}\n')
    run = run_task(LLAMA, f"task.prompts_jsonl={path}", f"task.output={path}")
    assert "is the file of the prompts" in str(run.error)
    assert "are both given" in str(run_task(LLAMA, f"task.prompts_jsonl={path}", "prompt=a").error)


@pytest.mark.parametrize("gone", ["temperature", "seed"])
def test_an_answer_to_a_request_that_said_more_is_another_s(generate: Generate, answers: Path, gone: str) -> None:
    generate()
    written = answers.read_bytes()
    run = generate(lines=[{key: value for key, value in line.items() if key != gone} for line in PROMPTS])
    assert "answers another request than" in str(run.error)
    assert answers.read_bytes() == written


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("/dev/full", "task.output=/dev/full is no regular file"),
        ("-", "task.output=- cannot be standard input or output here; a file of that name is ./-"),
        ("'~nosuchuser/x'", "no home folder is known for ~nosuchuser"),
    ],
)
def test_an_output_that_can_hold_no_answers_is_refused(generate: Generate, output: str, said: str) -> None:
    assert said in str(generate(f"task.output={output}").error)


def test_a_large_file_of_something_else_is_not_read(generate: Generate, answers: Path) -> None:
    with answers.open("wb") as file:
        file.truncate(1 << 40)
    assert "answers.jsonl:1: not a line of answers" in str(generate().error)
    assert answers.stat().st_size == 1 << 40
