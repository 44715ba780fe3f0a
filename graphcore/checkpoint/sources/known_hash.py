"""A cache of file hashes: hashing 5 GB takes 2.3 s, so a file with the same identity is not read again.

<folder>/<sha256 of the path>.json   path, identity and hash of a file, with a checksum of their own
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from graphcore.checked_file import read_checked, write_checked
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.sources.cached_file import file_sha256


def known_sha256(path: Path, folder: Path, on_read: Callable[[], None] = lambda: None) -> str:
    """Return the sha256 of a file: the cached one if the file has not changed, else computed from its bytes.

    Args:
        folder: folder of the cached hashes; if it cannot be written, the file is read each time.
        on_read: callback, called before the file is read.
    """
    real = path.resolve()
    note = folder / f"{hashlib.sha256(str(real).encode('utf-8', 'surrogateescape')).hexdigest()}.json"
    about = {"path": str(real), **asdict(FileIdentity.of(real.stat()))}
    kept = read_checked(note)
    if kept is not None:
        known: dict[str, object] = json.loads(kept)
        sha256 = known.pop("sha256")
        if known == about:
            return str(sha256)
    on_read()
    found = file_sha256(real)
    with suppress(OSError):
        write_checked(note, json.dumps({**about, "sha256": found}).encode())
    return found
