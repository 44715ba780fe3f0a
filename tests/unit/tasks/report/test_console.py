"""Results go to standard output; what is about them goes to standard error."""

import io
import re
import time

import pytest
from clock import Clock
from rich.console import Console as RichConsole
from screen import Screen

from graphcore.tasks.report.console import PLAIN_INTERVAL, PLAIN_TOKEN_INTERVAL, SLOW, Console


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
        "pack 20/30, ETA 0:02",
        "pack 30/30",
    ]


def test_bytes_have_a_unit_and_an_unknown_end_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(shows_progress=True)
    console.progress("download", None, 5_000_000, 98_000_000)
    console.progress("compile block0", None, 1, 0)
    assert capsys.readouterr().err.splitlines() == ["downloading 4.77/93.46 MiB", "compiling graph block0"]


def test_a_long_stage_has_few_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = Console(shows_progress=True, clock=clock)
    for second in range(301):
        console.progress("download", None, second * 1_000_000, 300_000_000)
        clock.now += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert 8 < len(lines) < 20
    assert lines[0] == "downloading 0.0/286.1 MiB"
    assert lines[-1] == "downloading 286.1/286.1 MiB, 976.6 KiB/s"


def test_what_has_no_known_end_says_how_long_it_took_where_that_was_long(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = Console(shows_progress=True, clock=clock)
    for name, seconds in (("block0_decode_1", 8.2), ("block1_decode_1", 1.0), ("head_1", 3.0)):
        console.progress(f"compile {name}", None, 1, 0)
        clock.now += seconds
    console.note("ready")
    clock.now += 60.0
    console.note("and more")
    assert capsys.readouterr().err.splitlines() == [
        "compiling graph block0_decode_1",
        "compiling graph block0_decode_1: 8.2 s",
        "compiling graph block1_decode_1",
        "compiling graph head_1",
        "compiling graph head_1: 3.0 s",
        "ready",
        "and more",
    ]


def test_an_end_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(shows_progress=True)
    for _ in range(3):
        console.progress("measure", None, 0, 0)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("width", [40, 80])
def test_a_bar_tells_all_words_at_any_width_and_seconds_where_nothing_else_goes_on(width: int) -> None:
    drawn, clock = io.StringIO(), Clock()
    terminal = RichConsole(file=drawn, force_terminal=True, width=width)
    console = Console(shows_progress=True, clock=clock, terminal=terminal)
    console.progress("download", None, 0, 98_000_000)
    clock.now += 1.0
    console.progress("download", None, 1_000_000, 98_000_000)
    time.sleep(0.3)  # the bar draws itself ten times a second, from a thread of its own
    console.progress("compile block0_decode_1", None, 1, 0)
    time.sleep(0.7)
    console.end_progress()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())
    seen = " ".join(re.sub(r"[\u2501\u2578\u257a]", " ", plain).split())
    for words in ("downloading 0.95/93.46 MiB", "976.6 KiB/s", "ETA 1:37", "compiling graph", "block0_decode_1", "1 s"):
        assert words in seen
    assert max(len(line) for line in re.split(r"[\r\n]", plain)) <= width


def test_what_takes_a_moment_is_announced_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Console(shows_progress=True).announce("starting")
    assert capsys.readouterr() == ("", "")


def test_an_announcement_is_gone_with_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    console = console_on(screen, Clock(), monkeypatch)
    console.announce("starting")
    assert screen.lines == ["starting"]
    console.note("something else")
    assert screen.lines == ["something else"]


def test_an_error_after_text_stands_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    console = console_on(screen, Clock(), monkeypatch)
    console.text("The capital of")
    console.finish()
    print("graphcore: StreamingError: ...")
    assert screen.lines == ["The capital of", "graphcore: StreamingError: ..."]
    console.text("Whole.\n")
    console.finish()
    console.text("Half")
    console.note("[a note]")
    assert screen.lines[2:] == ["Whole.", "Half", "[a note]"]


def test_an_empty_piece_of_text_neither_begins_a_line_nor_ends_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A token that spells a part of a character has no text yet."""
    console = Console(shows_progress=False)
    console.text("Whole.\n")
    console.text("")
    console.note("a note")
    console.text("Half")
    console.text("")
    console.note("another")
    assert capsys.readouterr() == ("Whole.\nHalf\n", "a note\nanother\n")


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
    assert screen.lines[-2:] == ["The capital of France is Par", "token 1/128, group 3/3, 476.8 MiB/s, E…"]
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
        "token 1/128, group 2/2, 381.5 MiB/s, ETA 10:32",
        "token 4/128, 381.5 MiB/s, ETA 10:20",
    ]
