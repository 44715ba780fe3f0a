"""Every error can be caught as ours and as the built-in that a caller would expect."""

import pytest

from graphcore import errors
from graphcore.errors import (
    BusyError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    GraphcoreError,
    GraphError,
    ParallelError,
    PlanError,
    ResidencyError,
    StreamingError,
    TemplateError,
    ThreadLimitError,
    TokenizerError,
    UnreadTokenizerError,
    UnsupportedError,
    quoted,
)

BUILT_INS = {
    ConfigError: ValueError,
    CheckpointError: ValueError,
    CheckpointNotFoundError: FileNotFoundError,
    UnsupportedError: ValueError,
    TokenizerError: ValueError,
    UnreadTokenizerError: ValueError,
    TemplateError: ValueError,
    PlanError: ValueError,
    GraphError: RuntimeError,
    ResidencyError: RuntimeError,
    StreamingError: RuntimeError,
    BusyError: RuntimeError,
    ParallelError: RuntimeError,
    ThreadLimitError: RuntimeError,
}


def test_every_error_class_is_listed_here() -> None:
    defined = {item for item in vars(errors).values() if isinstance(item, type)}
    assert defined == {*BUILT_INS, GraphcoreError}


@pytest.mark.parametrize(("error", "built_in"), BUILT_INS.items())
def test_an_error_is_ours_and_the_built_in_one_and_keeps_its_message(
    error: type[GraphcoreError], built_in: type[Exception]
) -> None:
    raised = error("model.gguf: tensor 'x' is wrong")
    assert isinstance(raised, GraphcoreError)
    assert isinstance(raised, built_in)
    assert str(raised) == "model.gguf: tensor 'x' is wrong"


def test_a_missing_checkpoint_is_a_checkpoint_error_too() -> None:
    assert issubclass(CheckpointNotFoundError, CheckpointError)
    assert issubclass(UnsupportedError, CheckpointError)


@pytest.mark.parametrize("error", BUILT_INS)
def test_a_message_is_one_printable_line_whatever_a_file_had_in_its_names(error: type[GraphcoreError]) -> None:
    assert str(error("two\nlines, \x1b[31m\u202e\ud800, caf\u00e9")) == "two lines, \\x1b[31m\\u202e\\ud800, caf\u00e9"
    long = str(error("begin " + "x" * 10**6 + " end"))
    assert len(long) <= errors.LONGEST
    assert long.startswith("begin xxx")
    assert long.endswith("xxx end")


@pytest.mark.parametrize(("name", "shown"), [("w", "'w'"), ("a\nb", r"'a\nb'"), ("\ud800", r"'\ud800'"), ([1], "[1]")])
def test_names_are_one_printable_line(name, shown):
    assert quoted(name) == shown


def test_long_names_keep_their_ends():
    shown = quoted("start" + "x" * 10**6 + "end")
    assert shown.startswith("'start")
    assert shown.endswith("end'")
    assert len(shown) < 110
