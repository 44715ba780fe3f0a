"""A block that all ranks load in: however it ends on one rank, that rank leaves the others."""

from typing import cast

import pytest

from graphcore.engine.ring.facts import together
from graphcore.parallel.process_group import ProcessGroup


class Ranks:
    """A process group whose calls are written down; Ctrl-C is pressed while one of them waits.

    Attributes:
        calls: names of the calls so far.
    """

    def __init__(self, interrupted: str) -> None:
        self._interrupted, self.calls = interrupted, list[str]()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._interrupted:
            raise KeyboardInterrupt

    def all_say(self, _said: None) -> None:
        self._called("all_say")

    def end_loading(self) -> None:
        self._called("end_loading")

    def say_error(self, _error: Exception) -> None:
        self._called("say_error")

    def leave(self, _error: BaseException) -> None:
        self._called("leave")


def load(ranks: Ranks, error: Exception | None) -> None:
    """Load on a rank, on which that fails with an error unless there is none."""
    with together(cast("ProcessGroup", ranks)):
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("interrupted", "error", "calls"),
    [
        ("all_say", None, ["all_say", "leave"]),
        ("end_loading", None, ["all_say", "end_loading", "leave"]),
        ("say_error", OSError("no such file"), ["say_error", "leave"]),
    ],
)
def test_a_rank_that_is_interrupted_while_it_waits_for_others_leaves_them(
    interrupted: str, error: Exception | None, calls: list[str]
) -> None:
    ranks = Ranks(interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(ranks, error)
    assert ranks.calls == calls


def test_an_error_is_told_before_the_rank_leaves() -> None:
    ranks = Ranks("")
    with pytest.raises(OSError, match="no such file"):
        load(ranks, OSError("no such file"))
    assert ranks.calls == ["say_error", "leave"]
