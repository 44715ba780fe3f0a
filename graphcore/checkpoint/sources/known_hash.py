"""Files' hashes, found once: 5 GB take 2.3 s, so a file that is the same by size and time is not read again.

<folder>/<sha256 of the path>.json   path, identity and hash of a file, in a form that is checked itself
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from graphcore.checked_file import read_checked, write_checked
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.sources.cached_file import file_sha256


def known_sha256(path: Path, folder: Path, on_read: Callable[[], None] = lambda: None) -> str:
    """Return the file's sha256: the one that was found before if the file is still the same, else by reading it.

    Args:
        folder: where hashes are kept; if it cannot be written to, the file is read each time.
        on_read: called before the file is read.
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
    try:
        write_checked(note, json.dumps({**about, "sha256": found}).encode())
    except OSError:
        return found
    return found
