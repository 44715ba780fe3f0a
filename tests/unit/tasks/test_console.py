"""Results go to standard output; what is about them goes to standard error."""

import io

import pytest
from clock import Clock
from rich.console import Console as RichConsole
from screen import Screen

from graphcore.tasks.console import PLAIN_INTERVAL, PLAIN_TOKEN_INTERVAL, SLOW, Console


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
        console.progress("pack", None, done, 30)
        clock.now += PLAIN_INTERVAL / 8
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "pack 1/30",
        "pack 10/30, ETA 0:05",
        "pack 19/30, ETA 0:03",
        "pack 28/30, ETA 0:00",
        "pack 30/30",
    ]


def test_bytes_are_shown_in_megabytes_and_an_unknown_end_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(shows_progress=True)
    console.progress("download", None, 5_000_000, 98_000_000)
    console.progress("compile block0", None, 1, 0)
    assert capsys.readouterr().err.splitlines() == ["download 5/98 MB", "compile block0"]


def test_nothing_is_shown_when_progress_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(shows_progress=False, terminal=RichConsole(file=io.StringIO(), force_terminal=True))
    console.progress("load", 0, 1, 2)
    console.end_progress()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_that_goes_away_before_text(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = io.StringIO()
    console = Console(shows_progress=True, terminal=RichConsole(file=drawn, force_terminal=True, width=100))
    console.progress("load", 2, 3, 30)
    console.progress("compile block0", None, 1, 0)
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


def console_on(screen: Screen, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Console:
    """Return a console whose results and notes go to one screen."""
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    terminal = RichConsole(file=screen, force_terminal=True, width=screen.width, height=screen.height)
    return Console(shows_progress=True, clock=clock, terminal=terminal)


def test_text_that_flows_is_progress_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, clock = Screen(), Clock()
    console = console_on(screen, clock, monkeypatch)
    for done in range(1, 6):
        console.progress("generate", None, done, 128)
        console.text("word ")
        clock.now += SLOW
    assert screen.lines == [("word " * 5).rstrip()]


@pytest.mark.parametrize("lines_before", [0, 9])
def test_a_slow_token_has_a_line_below_the_text_which_then_goes_on(
    monkeypatch: pytest.MonkeyPatch, lines_before: int
) -> None:
    screen, clock = Screen(), Clock()
    console = console_on(screen, clock, monkeypatch)
    console.expect_groups([0, 2_000_000_000, 2_000_000_000])
    for number in range(lines_before):
        console.note(f"note {number}")
    console.progress("generate", None, 1, 128)
    console.text("The capital of France is Par")
    for group in range(3):
        console.progress("generate", group, 1, 128)
        clock.now += 2 * SLOW
    assert screen.lines[-2:] == ["The capital of France is Par", "token 1/128, group 3/3, 0.50 GB/s, ETA…"]
    console.progress("generate", None, 2, 128)
    console.text("is.")
    assert screen.lines[-1] == "The capital of France is Paris."
    assert (len(screen.lines) == 1) == (lines_before == 0)
    console.line()
    console.note("done")
    assert screen.lines[-2:] == ["The capital of France is Paris.", "done"]


def test_before_the_first_token_the_line_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, clock = Screen(), Clock()
    console = console_on(screen, clock, monkeypatch)
    for group in range(4):
        console.progress("prefill", group, 0, 700)
        assert screen.lines == ([] if clock.now <= 100 + SLOW else [f"prompt token 0/700, group {group + 1}"])
        clock.now += SLOW
    console.text("Paris")
    assert screen.lines == ["Paris"]


@pytest.mark.parametrize("text", ["x" * 40, "a\tb", "one\ntwo\x1b[1m"])
def test_no_line_is_drawn_where_the_cursor_could_not_be_put_back(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    screen, clock = Screen(), Clock()
    console = console_on(screen, clock, monkeypatch)
    console.text(text)
    before = screen.lines
    clock.now += 10 * SLOW
    console.progress("generate", 1, 1, 128)
    clock.now += 10 * SLOW
    console.progress("generate", 2, 1, 128)
    assert screen.lines == before


def test_wrapped_text_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, clock = Screen(), Clock()
    console = console_on(screen, clock, monkeypatch)
    console.progress("generate", None, 1, 8)
    console.text("w" * 60)
    clock.now += 2 * SLOW
    console.progress("generate", 1, 1, 8)
    assert screen.lines == ["w" * 40, "w" * 20, "token 1/8, group 2"]
    console.text("end")
    assert screen.lines == ["w" * 40, "w" * 20 + "end"]


def test_without_a_terminal_tokens_have_a_line_from_time_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = Console(shows_progress=True, clock=clock)
    console.expect_groups([1_000_000_000] * 2)
    for done in range(1, 5):
        for group in range(2):
            console.progress("generate", group, done, 128)
            clock.now += PLAIN_TOKEN_INTERVAL / 4
        console.progress("generate", None, done + 1, 128)
    assert capsys.readouterr().err.splitlines() == [
        "token 1/128, group 2/2, 0.40 GB/s, ETA 10:32",
        "token 4/128, 0.40 GB/s, ETA 10:20",
    ]
