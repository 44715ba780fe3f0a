"""Names in messages."""

import pytest

from graphcore.checkpoint.quoted import quoted


@pytest.mark.parametrize(("name", "shown"), [("w", "'w'"), ("a\nb", r"'a\nb'"), ("\ud800", r"'\ud800'"), ([1], "[1]")])
def test_names_are_one_printable_line(name, shown):
    assert quoted(name) == shown


def test_long_names_keep_their_ends():
    shown = quoted("start" + "x" * 10**6 + "end")
    assert shown.startswith("'start")
    assert shown.endswith("end'")
    assert len(shown) < 110
