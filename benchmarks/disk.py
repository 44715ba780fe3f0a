"""Disk measurements: emptying the page cache, the cached share of files, and the speed of direct reads."""

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
READERS, CHUNK = 4, 8 << 20  # reads in flight, bytes of each


@dataclass(frozen=True)
class RawRead:
    """The speed of a file's read that bypassed the page cache."""

    gb_per_second: float
    how: str


def drop_caches(files: list[Path]) -> str:
    """Empty the page cache of the whole machine if that is allowed, else of these files; return which."""
    os.sync()
    try:
        DROP_CACHES.write_text("1", encoding="utf-8")
    except OSError:
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        return "the page cache of the model's files dropped (drop_caches is not allowed)"
    return "the machine's page cache dropped"


def cached_share(files: list[Path]) -> float:
    """Return the share of the files' pages that lie in the page cache."""
    counts = [cached_pages(path) for path in files]
    return sum(cached for cached, _ in counts) / max(1, sum(pages for _, pages in counts))


def cached_pages(path: Path) -> tuple[int, int]:
    """Return how many pages of a file are cached, and how many it has."""
    nbytes = path.stat().st_size
    if nbytes == 0:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        status = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), found)
        del first  # a map that is still referred to cannot be closed
    if status:
        raise OSError(ctypes.get_errno(), f"mincore failed on {path}")
    return sum(page & 1 for page in found), pages


def raw_read(path: Path) -> RawRead:
    """Read the file once with O_DIRECT, several reads in flight, by fio if it is installed, else by dd.

    Raises:
        OSError: the file system has no O_DIRECT, or neither program is there.
    """
    return fio(path) if shutil.which("fio") else dd(path)


def fio(path: Path) -> RawRead:
    quarter = path.stat().st_size // READERS // CHUNK * CHUNK
    command = ["fio", "--name=raw", f"--filename={path}", "--readonly", "--rw=read", "--direct=1", "--ioengine=psync"]
    command += [f"--bs={CHUNK}", f"--numjobs={READERS}", f"--size={quarter}", f"--offset_increment={quarter}"]
    command += ["--thread", "--group_reporting", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"fio: {done.stderr.strip()[-200:]}")
    rate = json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"] / 1e9
    return RawRead(rate, f"fio, O_DIRECT, {READERS} readers of {CHUNK >> 20} MiB")


def dd(path: Path) -> RawRead:
    count = path.stat().st_size // READERS // CHUNK
    began = time.perf_counter()
    command = ["dd", f"if={path}", "of=/dev/null", f"bs={CHUNK}", f"count={count}", "iflag=direct", "status=none"]
    readers = [subprocess.Popen([*command, f"skip={index * count}"]) for index in range(READERS)]
    statuses = [reader.wait() for reader in readers]
    if any(statuses):
        raise OSError(f"dd cannot read {path} with O_DIRECT; its message is above")
    rate = READERS * count * CHUNK / (time.perf_counter() - began) / 1e9
    return RawRead(rate, f"dd, O_DIRECT, {READERS} readers of {CHUNK >> 20} MiB")
