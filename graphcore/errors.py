"""The errors people see.

Every message says what was asked, what was found, where (file, tensor, key) and what to do, on one line. Each class
also subclasses the built-in a caller would catch. On the command line a GraphcoreError is one line and exit status 1,
or 2 where what was typed names something that there is not.
"""

LONGEST = 1000  # characters of a message; names out of a damaged file may have thousands


class GraphcoreError(Exception):
    """Anything that the user can fix: a file, a key, a size.

    Whatever a file had in its names, the message is one line that a terminal prints and does not obey.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


def _one_line(message: str) -> str:
    if len(message) > LONGEST:
        message = f"{message[: LONGEST * 2 // 3]} ... {message[-LONGEST // 4 :]}"
    if message.isprintable():
        return message
    return "".join(
        letter if letter.isprintable() else " " if letter == "\n" else ascii(letter)[1:-1] for letter in message
    )


class ConfigError(GraphcoreError, ValueError):
    """A setting is misspelt, of the wrong type, out of range, or without effect here.

    Attributes:
        is_unknown: bool, whether the message is about a flag, key or option that does not exist, or about a value of
            the wrong type: exit status 2.
    """

    def __init__(self, message: str, is_unknown: bool = False) -> None:
        super().__init__(message)
        self.is_unknown = is_unknown


class CheckpointError(GraphcoreError, ValueError):
    """A checkpoint's bytes, names, shapes or metadata are not what they must be."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint, or one of its files, is not there or cannot be fetched."""


class UnsupportedError(CheckpointError):
    """The checkpoint is sound, but asks for an architecture, type or rule that graphcore does not know."""


class TokenizerError(GraphcoreError, ValueError):
    """Text cannot become token ids, or the reverse, with what the checkpoint holds."""


class TemplateError(TokenizerError):
    """A chat template gives no text: it is none, refuses the messages, fails on them, or exceeds its bounds."""


class PlanError(GraphcoreError, ValueError):
    """The model does not fit where it was asked to fit.

    Attributes:
        smallest: the plan that takes least (weights/plan.py), for those who show it; None where none was made.
    """

    def __init__(self, message: str, smallest: object = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class GraphError(GraphcoreError, RuntimeError):
    """A graph cannot be compiled, captured or replayed here."""


class ResidencyError(GraphcoreError, RuntimeError):
    """A weight does not lie where it was planned to lie."""


class BusyError(GraphcoreError, RuntimeError):
    """An engine is in use, and the call that asks for it would wait for ever."""


class StreamingError(GraphcoreError, RuntimeError):
    """Weights cannot be moved any more: a thread that moved them has died, or their engine is closed."""
