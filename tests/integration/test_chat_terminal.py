"""task=chat at a terminal, as somebody who types: a pseudo-terminal of 40 columns and a process of its own."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_folders import save_chat_folder
from support.processes import Started, environment

PATIENCE = 60.0  # seconds for anything to appear
CTRL_C, CTRL_D = "\x03", "\x04"
ARROW_UP = "\x1b[A"
ANSWERED = "%> "  # the model's name and the context's fill stand before it


class Terminal:
    """A person's side of a terminal: what was shown, and a keyboard."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        checkpoint = save_chat_folder(folder / "model")
        settings = ["task=chat", f"model.checkpoint={checkpoint}", "graph=eager", "device=cpu", "hydra.run.dir=run"]
        variables = {**environment(), "TERM": "xterm", "INPUTRC": "/dev/null"}
        self.process = Started([*settings, *arguments], folder, [slave] * 3, has_terminal=True, variables=variables)
        os.close(slave)
        self.shown = ""

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait_for(self, text: str) -> str:
        """Return what was shown up to the text and take it off `shown`."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.shown:
            self._read_more(deadline, text)
        before, _, self.shown = self.shown.partition(text)
        return before

    def wait_for_more(self) -> None:
        """Wait until anything is shown that was not waited for."""
        deadline = time.monotonic() + PATIENCE
        while not self.shown.strip():
            self._read_more(deadline, "anything")

    def _read_more(self, deadline: float, awaited: str) -> None:
        assert select.select([self.master], [], [], deadline - time.monotonic())[0], f"never shown: {awaited!r}"
        try:
            received = os.read(self.master, 4096).decode(errors="replace")
        except OSError:  # the other side has gone
            received = ""
        assert received, f"ended before {awaited!r}: {self.shown!r}"
        self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", received)

    def turns(self) -> list[dict[str, object]]:
        """End the chat and return its turns."""
        self.press(CTRL_D)
        self.wait_for("run/result.json\n")
        assert self.process.wait(PATIENCE) == 0
        return json.loads((self.folder / "run" / "result.json").read_text())["turns"]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, "max_new_tokens=300", "context_length=4096", "repetition_detection=false")
    opened.wait_for("> ")
    yield opened
    if opened.process.returncode is None:
        opened.process.send_signal(signal.SIGKILL)
        opened.process.wait()
    os.close(opened.master)


@pytest.mark.thorough
def test_what_is_typed_while_it_answers_waits_unseen(terminal: Terminal) -> None:
    terminal.press("one\n")
    terminal.wait_for("one\n")
    terminal.wait_for_more()  # the answer has begun
    terminal.press("typed ahead\nand more")
    answer = terminal.wait_for(ANSWERED)
    assert "typed" not in answer
    assert "ahead" in terminal.wait_for("\n")  # shown behind the mark, as if it were typed now
    terminal.wait_for(ANSWERED)
    terminal.press(" later\n")
    terminal.wait_for(ANSWERED)
    assert [turn["user"] for turn in terminal.turns()] == ["one", "typed ahead", "and more later"]


def test_ctrl_c_stops_an_answer_and_drops_a_line_and_the_chat_goes_on(terminal: Terminal) -> None:
    terminal.press("/set max_new_tokens=null\none\n")
    terminal.wait_for("one\n")
    time.sleep(0.3)
    terminal.press(CTRL_C)
    terminal.wait_for(ANSWERED)
    terminal.press("never said")
    terminal.wait_for("never said")
    time.sleep(0.3)  # readline's loop notices Ctrl-C only where it waits for a key (CPython, call_readline)
    terminal.press(CTRL_C)
    terminal.wait_for(ANSWERED)
    terminal.press("/set max_new_tokens=3\ntwo\n")
    terminal.wait_for("two\n")
    terminal.wait_for(ANSWERED)
    turns = terminal.turns()
    assert [(turn["user"], turn["finish_reason"]) for turn in turns] == [("one", "interrupted"), ("two", "length")]


def test_a_mistake_is_said_and_the_chat_goes_on(terminal: Terminal) -> None:
    terminal.press("/hlep\n")
    assert "[unknown command /hlep (did you mean '/help'?)" in terminal.wait_for(ANSWERED).replace("\n", "")
    terminal.press('/set max_new_tokens=3\n"""a\nb"""\n')
    terminal.wait_for('b"""\n')
    terminal.wait_for(ANSWERED)
    terminal.press("c \\\nd\n")
    terminal.wait_for("d\n")
    terminal.wait_for(ANSWERED)
    assert [turn["user"] for turn in terminal.turns()] == ["a\nb", "c \nd"]


@pytest.mark.thorough
def test_a_long_line_typed_while_it_answers_is_whole(terminal: Terminal) -> None:
    terminal.press("one\n")
    terminal.wait_for("one\n")
    time.sleep(0.3)
    terminal.press("x" * 5000 + "\n")
    terminal.wait_for(ANSWERED)  # the first answer's end
    said = re.sub(r"\s", "", terminal.wait_for("tokens"))
    taken = len("user:" + "assistant:") + 5000 + 2
    assert int(said.rpartition("takes")[2]) == taken  # characters are tokens here; the first turn is left out


@pytest.mark.thorough
def test_ctrl_d_while_it_answers_ends_the_chat_behind_the_answer(terminal: Terminal) -> None:
    terminal.press("one\n")
    terminal.wait_for("one\n")
    time.sleep(0.3)
    (turn,) = terminal.turns()
    assert turn["finish_reason"] in ("length", "end")


@pytest.mark.thorough
def test_typed_lines_are_kept_between_chats_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "state" / "graphcore" / "chat_history"
    for folder, key, presses in (("a", "false", "one\n"), ("b", "true", "two\n"), ("c", "true", ARROW_UP + "\n")):
        (tmp_path / folder).mkdir()
        opened = Terminal(tmp_path / folder, "max_new_tokens=3", f"chat_history={key}")
        opened.wait_for(ANSWERED)
        opened.press(presses)
        opened.wait_for("\n")
        opened.wait_for(ANSWERED)
        said = [turn["user"] for turn in opened.turns()]
        os.close(opened.master)
        assert file.exists() == (key == "true")
    assert said == ["two"]
    assert file.read_text(encoding="utf-8") == "two\n"  # readline adds no line that equals the last


@pytest.mark.parametrize("deadly", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_an_answer_leaves_the_terminal_as_it_was(terminal: Terminal, deadly: signal.Signals) -> None:
    terminal.press("/set max_new_tokens=null\none\n")
    terminal.wait_for("one\n")
    time.sleep(0.3)
    assert not termios.tcgetattr(terminal.master)[3] & termios.ECHO
    terminal.process.send_signal(deadly)
    died = deadly is signal.SIGQUIT  # which leaves no result
    assert terminal.process.wait(PATIENCE) == (-deadly if died else 128 + deadly)
    if not died:
        record = json.loads((terminal.folder / "run" / "result.json").read_text())
        assert (record["status"], record["turns"][0]["finish_reason"]) == ("interrupted", "interrupted")
    modes = termios.tcgetattr(terminal.master)[3]
    assert modes & termios.ECHO
    assert modes & termios.ICANON


@pytest.mark.thorough
@pytest.mark.parametrize("is_answering", [False, True])
def test_a_terminal_that_closes_ends_the_chat_with_what_was_said(terminal: Terminal, is_answering: bool) -> None:
    terminal.press("one\n")
    terminal.wait_for("one\n")
    terminal.wait_for(ANSWERED)
    if is_answering:
        terminal.press("/set max_new_tokens=null\ntwo\n")
        terminal.wait_for("two\n")
        time.sleep(0.3)
    os.close(terminal.master)  # the kernel sends SIGHUP
    terminal.master = os.open(os.devnull, os.O_RDONLY)
    assert terminal.process.wait(PATIENCE) == 128 + signal.SIGHUP
    record = json.loads((terminal.folder / "run" / "result.json").read_text())
    assert record["status"] == "interrupted"
    assert [turn["user"] for turn in record["turns"]] == ["one", "two"][: 1 + is_answering]


@pytest.mark.thorough
def test_sigterm_ends_a_chat_that_waits_for_a_line(terminal: Terminal) -> None:
    terminal.press("one\n")
    terminal.wait_for(ANSWERED)
    terminal.press("half a li")
    time.sleep(0.3)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(PATIENCE) == 143
    record = json.loads((terminal.folder / "run" / "result.json").read_text())
    assert (record["status"], len(record["turns"])) == ("interrupted", 1)
