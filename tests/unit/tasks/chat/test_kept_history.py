"""The file with the lines that were typed in earlier chats."""

import readline
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphcore.tasks.chat.typed_lines import kept_history


@pytest.fixture(autouse=True)
def _empty_history() -> Iterator[None]:
    readline.clear_history()
    yield
    readline.clear_history()


def test_the_last_thousand_lines_are_kept_for_the_user_alone(tmp_path: Path) -> None:
    file, said = tmp_path / "state" / "graphcore" / "chat_history", []
    with kept_history(file, said.append):
        for number in range(1003):
            readline.add_history(f"line {number}")
    assert file.read_text(encoding="utf-8").splitlines() == [f"line {number}" for number in range(3, 1003)]
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    readline.clear_history()
    file.chmod(0o644)
    with kept_history(file, said.append):
        assert readline.get_history_item(readline.get_current_history_length()) == "line 1002"
        readline.add_history("one more")
    assert file.read_text(encoding="utf-8").splitlines()[-2:] == ["line 1002", "one more"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert said == []


def test_a_file_that_others_can_read_is_closed_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chat_history"
    file.touch(mode=0o644)
    # GNU readline writes a new file, which is the user's alone; libedit's keeps the mode of the one that exists.
    monkeypatch.delattr(readline, "append_history_file", raising=False)
    monkeypatch.setattr(readline, "write_history_file", lambda path: path.write_text("typed\n", encoding="utf-8"))
    with kept_history(file, pytest.fail):
        pass
    assert file.read_text(encoding="utf-8") == "typed\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_used_is_said_and_the_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    with kept_history(tmp_path / "file" / "chat_history", said.append):
        readline.add_history("typed")
    assert [line.partition(" cannot be ")[2] for line in said] == [
        "read (Not a directory); the history begins anew]",
        "written (File exists); the lines are not kept]",
    ]


@pytest.mark.skipif(not hasattr(readline, "append_history_file"), reason="this readline cannot append to a history")
def test_lines_that_another_chat_has_written_meanwhile_stay(tmp_path: Path) -> None:
    file = tmp_path / "chat_history"
    readline.clear_history()
    with kept_history(file, pytest.fail):
        readline.add_history("mine")
        file.write_text("another's\n", encoding="utf-8")
    assert file.read_text(encoding="utf-8").splitlines() == ["another's", "mine"]
    readline.clear_history()
