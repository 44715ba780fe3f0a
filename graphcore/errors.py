"""The errors that users see.

Every message says what was asked, what was found, where (file, tensor, key) and what to do, on one line. Each class is
also a subclass of the built-in that a caller would catch. On the command line a GraphcoreError is one line and exit
status 1, or 2 if the user named something that does not exist.
"""

LONGEST = 1000  # characters of a message; names from a damaged file may have thousands

LONGEST_NAME = 100  # characters; llama.cpp's tensor names end at 63, Hugging Face's at about 90


def quoted(name: object) -> str:
    """Return a name from a file for a message: a one-line literal, cut in the middle if it is long."""
    literal = ascii(name)
    if len(literal) <= LONGEST_NAME:
        return literal
    return f"{literal[: LONGEST_NAME // 2]}...{literal[-LONGEST_NAME // 4 :]}"


class GraphcoreError(Exception):
    """A problem that the user can fix: a file, a key, a size.

    Whatever names a file contains, the message is one line without control characters for the terminal.
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
        is_unknown: bool, True if the message is about a flag, key or option that does not exist, or about a value of
            the wrong type: exit status 2.
    """

    def __init__(self, message: str, is_unknown: bool = False) -> None:
        super().__init__(message)
        self.is_unknown = is_unknown


class CheckpointError(GraphcoreError, ValueError):
    """A checkpoint's bytes, names, shapes or metadata are not what they must be."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint, or one of its files, does not exist or cannot be fetched."""


class UnsupportedError(CheckpointError):
    """The checkpoint is sound, but asks for an architecture, type or rule that graphcore does not know."""


class TokenizerError(GraphcoreError, ValueError):
    """Text cannot become token ids, or the reverse, with what the checkpoint holds."""


class UnreadTokenizerError(TokenizerError):
    """A tokenizer of a kind that graphcore does not read; the model runs on token ids alone."""


class TemplateError(TokenizerError):
    """A chat template gives no text: it is invalid, rejects the messages, fails on them, or exceeds its bounds."""


class PlanError(GraphcoreError, ValueError):
    """The model does not fit into the given memory.

    Attributes:
        smallest: the plan that takes least memory (weights/plan.py); None if no plan was made.
    """

    def __init__(self, message: str, smallest: object = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class GraphError(GraphcoreError, RuntimeError):
    """A graph cannot be compiled, captured or replayed on this machine."""


class ResidencyError(GraphcoreError, RuntimeError):
    """A weight does not lie where it was planned to lie."""


class BusyError(GraphcoreError, RuntimeError):
    """An engine is in use, and the call that needs it would wait forever."""


class ThreadLimitError(GraphcoreError, RuntimeError):
    """The system starts no more threads or processes: a limit of a control group, a user or the machine is reached."""


class StreamingError(GraphcoreError, RuntimeError):
    """Weights cannot be moved: a thread that reads them has failed, the device has failed, or the engine is closed."""


class ParallelError(GraphcoreError, RuntimeError):
    """The ranks of a process group cannot work together: one has ended, or they have different files or settings."""
