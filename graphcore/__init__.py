"""graphcore runs large language models as compiled graphs, whether or not they fit in memory."""

__version__ = "0.1.0"
