"""The folder where code is built: a cache folder, or a temporary one if nothing can be built in the cache folder.

cache_dir/compiled/<key>, cache_dir/kernels     kept, unless read-only, full, mounted noexec, or occupied by a file
$TMPDIR/graphcore-xxxxxxxx                      one for each process, deleted when it ends
"""

import atexit
import functools
import os
import shlex
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOM = 16 << 20  # bytes; one model's graphs or kernels need a few megabytes
TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # tried after $TMPDIR


def build_folder(kept: Path, key: str = "cache_dir") -> tuple[Path, str]:
    """Return a folder to build code in, and a note if it is not the one that would keep the code.

    Args:
        kept: folder that keeps the code for the next start, created if needed.
        key: name of the setting that chose it, for the note.

    Returns:
        The temporary folder if nothing can be built in `kept`. If there is no temporary one either, `kept`: using it
        raises the error that says why.
    """
    reason = obstacle(kept)
    temporary = None if reason is None else temporary_folder()
    if temporary is None:
        return kept, ""
    return temporary, (
        f"{kept} cannot keep built code ({reason}): a temporary folder has it, and each start builds it again; set "
        f"{key} to a folder that can be written to"
    )


def obstacle(folder: Path) -> str | None:
    """Return why nothing can be built in a folder, which is created if needed; None if it can."""
    is_runnable = True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            if sys.platform == "linux":
                os.posix_fallocate(probe.fileno(), 0, ROOM)  # unlike statvfs, it also fails if a quota is exceeded
                is_runnable = not os.fstatvfs(probe.fileno()).f_flag & os.ST_NOEXEC
    except OSError as error:
        return error.strerror or str(error)
    return None if is_runnable else "Mounted noexec"


@functools.cache
def temporary_folder() -> Path | None:
    """Return this process's temporary folder for built code; None if no temporary folder is usable."""
    for place in dict.fromkeys((os.environ.get("TMPDIR", TEMPORARY[0]), *TEMPORARY)):
        if not is_one_word(Path(place)) or not Path(place).is_dir() or obstacle(Path(place)) is not None:
            continue
        with suppress(OSError):  # the disk has just been filled
            folder = tempfile.mkdtemp(prefix="graphcore-", dir=place)
            atexit.register(_remove, folder, os.getpid())
            return Path(folder)
    return None


def is_one_word(path: Path) -> bool:
    """Return whether a shell reads a path as one word without quotes, because torch's commands do not quote it."""
    return shlex.quote(str(path)) == str(path)


def _remove(folder: str, owner: int) -> None:
    """Delete the folder when its process ends, but not when a process forked from it does."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
