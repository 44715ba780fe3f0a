"""Many cheap cases in one test: a loop, with the case in the message of a failure."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_case(*facts: object) -> Iterator[None]:
    """Add what this case is to any error inside the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {', '.join(map(str, facts))}")
        raise
