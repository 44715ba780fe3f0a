"""Results go to standard output; what is about them goes to standard error."""

import io

import pytest
from rich.console import Console as RichConsole

from graphcore.tasks.console import PLAIN_INTERVAL, Console


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_text_and_lines_are_results_and_notes_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(shows_progress=True)
    console.text("one ")
    console.text("two")
    console.line()
    console.note("about it")
    assert capsys.readouterr() == ("one two\n", "about it\n")


def test_without_a_terminal_progress_is_few_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = Console(shows_progress=True, clock=clock)
    for done in range(1, 31):
        console.progress("load", done, 30)
        clock.now += PLAIN_INTERVAL / 8
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["load 1/30", "load 10/30", "load 19/30", "load 28/30", "load 30/30"]


def test_bytes_are_shown_in_megabytes_and_an_unknown_end_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(shows_progress=True)
    console.progress("download", 5_000_000, 98_000_000)
    console.progress("compile block0", 1, 0)
    assert capsys.readouterr().err.splitlines() == ["download 5/98 MB", "compile block0"]


def test_nothing_is_shown_when_progress_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(shows_progress=False, terminal=RichConsole(file=io.StringIO(), force_terminal=True))
    console.progress("load", 1, 2)
    console.end_progress()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_that_goes_away_before_text(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = io.StringIO()
    console = Console(shows_progress=True, terminal=RichConsole(file=drawn, force_terminal=True, width=100))
    console.progress("load", 3, 30)
    console.progress("compile block0", 1, 0)
    console.text("Hello")
    assert "load" in drawn.getvalue() or "compile block0" in drawn.getvalue()
    assert drawn.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back, the line is wiped
    assert capsys.readouterr().out == "Hello"


def test_a_table_has_its_title_and_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    Console(shows_progress=False).table("speeds", ("", "median"), [["prefill [x]", "12.5"]])
    out = capsys.readouterr().out
    assert out.startswith("speeds\n")
    assert "prefill [x]" in out
    assert "12.5" in out
