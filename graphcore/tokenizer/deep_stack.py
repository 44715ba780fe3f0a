"""Runs a function with a stack that is deep enough for a library that follows its input by recursion.

llguidance follows a chain of rules, or of $ref in a JSON schema, by one call each, and ends the process where the stack
of the thread ends: 8 MB end at some 1,500 rules, which are 20,000 characters.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from graphcore.errors import ConfigError, ThreadLimitError
from graphcore.threads import start_thread, tight_limits

BYTES_PER_CHARACTER = 2048  # of the stack; the deepest grammars known take 700
LEAST_BYTES = 16 << 20
_choosing_size = threading.Lock()  # the size is a setting of the whole process
Result = TypeVar("Result")


def stack_nbytes(length: int) -> int:
    """Return the bytes of address space of a stack for a text of some length."""
    return LEAST_BYTES + length * BYTES_PER_CHARACTER


def run_in_deep_stack(work: Callable[[], Result], length: int) -> Result:
    """Return the result of a function that is called in a thread of its own, whose stack fits a text of some length.

    Memory is only used as far as the recursion goes.

    Args:
        length: characters of the text that the function follows.

    Raises:
        ConfigError: the machine has no room for the stack.
        ThreadLimitError: the system starts no more threads.
        BaseException: what the function raises.
    """
    found: Future[Result] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised for the caller
            found.set_exception(error)

    with _choosing_size:
        before = threading.stack_size(stack_nbytes(length))
        try:
            start_thread(run, "graphcore-grammar")
        except ThreadLimitError as error:
            if next(tight_limits(1), None) is not None:
                raise  # a shorter text would not help
            raise ConfigError(f"there is no room for a stack for {length} characters ({error}); shorten it") from error
        finally:
            threading.stack_size(before)
    return found.result()
