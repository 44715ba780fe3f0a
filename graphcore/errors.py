"""The errors people see.

Every message says what was asked, what was found, where (file, tensor, key) and what to do, on one line. Each class
also subclasses the built-in a caller would catch. On the command line a GraphcoreError is one line and exit status 1.
"""


class GraphcoreError(Exception):
    """Anything that the user can fix: a file, a key, a size."""


class ConfigError(GraphcoreError, ValueError):
    """A setting is misspelt, of the wrong type, out of range, or without effect here."""


class CheckpointError(GraphcoreError, ValueError):
    """A checkpoint's bytes, names, shapes or metadata are not what they must be."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint, or one of its files, is not there or cannot be fetched."""


class UnsupportedError(CheckpointError):
    """The checkpoint is sound, but asks for an architecture, type or rule that graphcore does not know."""


class TokenizerError(GraphcoreError, ValueError):
    """Text cannot become token ids, or the reverse, with what the checkpoint holds."""


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


class StreamingError(GraphcoreError, RuntimeError):
    """Weights cannot be moved any more: a thread that moved them has died, or their engine is closed."""
