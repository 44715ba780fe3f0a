"""task=chat over piped lines: the cache is reused, and the answers are those of a conversation run from scratch."""

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from support.task_runs import NEW

from graphcore import Engine
from graphcore.engine.request import Request
from graphcore.engine.request_handle import RequestHandle
from graphcore.tasks.chat import conversation


def answers_from_scratch(folder: Path, texts: list[str]) -> list[tuple[str, int]]:
    """Return each answer, and its prompt's length, of a new engine for every turn."""
    messages: list[dict[str, str]] = []
    found = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        with Engine.load(folder, graph="eager", device="cpu") as engine:
            ids = engine.chat_ids(messages)
            answer = engine.generate([ids], max_new_tokens=NEW)[0].text
        messages.append({"role": "assistant", "content": answer})
        found.append((answer, len(ids)))
    return found


def test_turns_reuse_the_cache_and_answer_as_without_it(
    say, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["hello there", "how are you?", "bye"]
    run = say("".join(f"{text}\n\n" for text in texts))
    turns = run.record["turns"]
    assert run.status == 0
    assert [(turn["text"], turn["prompt_tokens"]) for turn in turns] == answers_from_scratch(chat_folder, texts)
    assert capsys.readouterr().out.splitlines() == [turn["text"] for turn in turns]
    # One character is one token: what is run before an answer ends with its last character but one.
    first = len("user:hello there") + 2 + len("assistant:")
    assert [turn["reused_tokens"] for turn in turns[:2]] == [0, first + NEW - 1]
    assert run.record["reused_tokens"] == sum(turn["reused_tokens"] for turn in turns)


def test_clear_forgets_and_exit_ends(say) -> None:
    run = say("one\n/clear\none\n/exit\nnever\n")
    first, second = run.record["turns"]
    assert (first["text"], first["prompt_tokens"]) == (second["text"], second["prompt_tokens"])
    assert second["reused_tokens"] == second["prompt_tokens"] - 1  # the same prompt is all there, but for its last


def test_the_prompt_opens_the_chat_and_a_system_message_stays(say) -> None:
    run = say("/clear\nagain\n", "prompt=first", "system=be brief")
    assert [turn["user"] for turn in run.record["turns"]] == ["first", "again"]
    of_system = len("system:be brief") + 2
    assert run.record["turns"][1]["prompt_tokens"] == of_system + len("user:again") + 2 + len("assistant:")


def test_only_what_an_answer_in_channels_says_goes_back_to_the_template(say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "final_message", lambda tokenizer, token_ids: "said")
    turns = say("one\ntwo\n").record["turns"]
    history = sum(len(text) + 2 for text in ("user:one", "assistant:said", "user:two"))  # 2: <|end|> and a line break
    assert turns[1]["prompt_tokens"] == history + len("assistant:")
    assert len(turns[0]["text"]) > len("said")


def test_ctrl_c_stops_the_answer_and_not_the_chat(say, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, take, cancel = RequestHandle.event, Request.take, RequestHandle.cancel
    runs, is_cancelled = list[int](), threading.Event()

    def interrupted(self: RequestHandle, at: int):
        runs.append(at)
        if at == 4 and runs.count(0) == 1:
            raise KeyboardInterrupt
        return whole(self, at)

    def taken(self: Request, *token: Any) -> None:
        """Wait before the sixth token until the answer is cancelled: a fast machine would end it before."""
        assert len(self.token_ids) < 5 or is_cancelled.wait(60), "Ctrl-C has not cancelled the answer"
        take(self, *token)

    def cancelled(self: RequestHandle) -> None:
        cancel(self)
        is_cancelled.set()

    monkeypatch.setattr(RequestHandle, "event", interrupted)
    monkeypatch.setattr(Request, "take", taken)
    monkeypatch.setattr(RequestHandle, "cancel", cancelled)
    run = say("one\ntwo\n")
    first, second = run.record["turns"]
    assert run.status == 0
    assert (first["finish_reason"], second["finish_reason"]) == ("interrupted", "length")
    # How far the engine came before Ctrl-C depends on the machine, and an end token in the answer is not said again.
    read = first["prompt_tokens"] + 4
    assert read - 1 <= second["reused_tokens"] <= first["prompt_tokens"] + first["new_tokens"]


def test_ctrl_c_between_piped_lines_ends_with_what_was_said(say, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.StringIO):
        def readline(self, size: int = -1) -> str:
            line = super().readline(size)
            if not line:
                raise KeyboardInterrupt
            return line

    monkeypatch.setattr("io.StringIO", Pipe)
    run = say("one\n")
    assert (run.status, run.record["status"], len(run.record["turns"])) == (130, "interrupted", 1)


def test_without_a_template_text_grows(say, base_folder: Path) -> None:
    run = say("once\nand then\n", "chat=off", checkpoint=base_folder)
    first, second = run.record["turns"]
    assert run.record["chat_template"] is False
    assert first["prompt_tokens"] == 4
    assert second["prompt_tokens"] == 4 + NEW + len("\nand then")
    with Engine.load(base_folder, graph="eager", device="cpu") as engine:
        text = f"once{first['text']}\nand then"
        assert second["text"] == engine.generate([engine.tokenizer.encode(text)], max_new_tokens=NEW)[0].text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["prompt_ids=[1]"], "prompt_ids has no effect with task=chat"),
        (["prompt='-'"], "prompt=- has no effect with task=chat"),
        (["batch_size=2"], "batch_size=2 has no effect with task=chat"),
        (["context_length=12"], "and the context has 12; send less at a time"),
    ],
)
def test_what_cannot_be_answered_is_one_line(say, overrides: list[str], said: str) -> None:
    run = say("hello\n", *overrides)
    assert run.status == 1
    assert said in str(run.error)


def test_a_base_model_needs_to_be_told(say, base_folder: Path) -> None:
    run = say("hello\n", checkpoint=base_folder)
    assert "task=chat needs a chat template" in str(run.error)
    assert "chat=off" in str(run.error)
