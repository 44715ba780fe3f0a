"""A file that is read again and again: direct or buffered, by several threads, and whatever happens to it meanwhile."""

import errno
import mmap
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphcore.checkpoint.file_bytes import file_identity
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.streamed_file import ALIGNMENT, StreamedFile, trial
from graphcore.errors import CheckpointError, CheckpointNotFoundError, StreamingError

SIZE = 5 * ALIGNMENT + 1234  # the last block is not whole
CONTENT = bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy())


def aligned(nbytes: int) -> Tensor:
    """Return memory that starts on a page: [nbytes] uint8."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def stored(folder: Path) -> Path:
    path = folder / "m.safetensors"
    path.write_bytes(CONTENT)
    os.utime(path, ns=(0, 0))  # so that whatever is written now is seen to be later
    return path


def opened(path: Path, direct: bool) -> StreamedFile:
    return StreamedFile.open(path, file_identity(path), direct)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return stored(tmp_path)


@pytest.fixture(params=["direct", "buffered"])
def source(path: Path, request: pytest.FixtureRequest) -> Iterator[StreamedFile]:
    with opened(path, request.param == "direct") as source:
        if source.is_direct != (request.param == "direct"):
            pytest.skip(source.why_buffered)
        yield source


def test_every_block_is_read_and_the_last_one_to_the_files_end(source: StreamedFile) -> None:
    space = aligned(8 * ALIGNMENT)
    assert source.read_into(space, 0, 8 * ALIGNMENT) == SIZE
    assert space[:SIZE].numpy().tobytes() == CONTENT
    assert source.read_into(space, 5 * ALIGNMENT, ALIGNMENT) == 1234
    assert space[:1234].numpy().tobytes() == CONTENT[-1234:]
    assert source.read_into(space[ALIGNMENT:], 2 * ALIGNMENT, ALIGNMENT) == ALIGNMENT
    assert space[ALIGNMENT : 2 * ALIGNMENT].numpy().tobytes() == CONTENT[2 * ALIGNMENT : 3 * ALIGNMENT]


def test_only_as_many_bytes_as_asked_for_are_written(source: StreamedFile) -> None:
    space = aligned(3 * ALIGNMENT)
    assert source.read_into(space, ALIGNMENT, ALIGNMENT) == ALIGNMENT
    assert not space[ALIGNMENT:].any()


def test_buffered_reads_take_any_offset_size_and_address(path: Path) -> None:
    with opened(path, direct=False) as source:
        assert not source.is_direct
        assert source.why_buffered == "buffered reads were asked for"
        space = torch.zeros(1000, dtype=torch.uint8)
        assert source.read_into(space[13:], 777, 901) == 901
        assert space[13:914].numpy().tobytes() == CONTENT[777:1678]
        assert not space[914:].any()


@pytest.mark.parametrize("wrong", ["address", "offset", "size"])
def test_a_direct_read_that_is_not_aligned_is_our_mistake(path: Path, wrong: str) -> None:
    with opened(path, direct=True) as source:
        if not source.is_direct:
            pytest.skip(source.why_buffered)
        space = aligned(3 * ALIGNMENT)
        with pytest.raises(AssertionError, match="not aligned"):
            source.read_into(space[wrong == "address" :], 512 * (wrong == "offset"), ALIGNMENT + 8 * (wrong == "size"))


def test_several_threads_read_one_file_at_a_time(source: StreamedFile) -> None:
    def read(index: int) -> bool:
        space, offset = aligned(ALIGNMENT), index % 6 * ALIGNMENT
        count = source.read_into(space, offset, ALIGNMENT)
        return space[:count].numpy().tobytes() == CONTENT[offset : offset + ALIGNMENT]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(200)))


@pytest.mark.parametrize("blocks_left", [0, 2, 2.25])
def test_a_read_after_the_end_of_a_file_that_shrank_is_an_error(source: StreamedFile, blocks_left: float) -> None:
    left = int(blocks_left * ALIGNMENT)
    with source.path.open("r+b") as stream:
        stream.truncate(left)
    space = aligned(8 * ALIGNMENT)
    said = rf"m\.safetensors: bytes 0 to {SIZE} are needed, the file now ends at {left}; it shrank .* fetch it again"
    with pytest.raises(CheckpointError, match=said):
        source.read_into(space, 0, 8 * ALIGNMENT)
    with pytest.raises(CheckpointError, match="changed while it was being read: it shrank from 21714 to"):
        source.check_unchanged()


def test_a_read_beyond_the_new_end_of_a_file_names_that_end(source: StreamedFile) -> None:
    os.truncate(source.path, 5000)
    with pytest.raises(CheckpointError, match=rf"bytes {2 * ALIGNMENT} to .* the file now ends at 5000; it shrank"):
        source.read_into(aligned(ALIGNMENT), 2 * ALIGNMENT, ALIGNMENT)


def test_a_file_overwritten_in_place_is_told(source: StreamedFile) -> None:
    source.check_unchanged()
    with source.path.open("r+b") as stream:
        stream.write(b"x")
    with pytest.raises(CheckpointError, match="being read: it was written to; load the model again"):
        source.check_unchanged()


def test_a_file_overwritten_in_place_whose_time_was_set_back_is_told(source: StreamedFile) -> None:
    before = source.path.stat()
    while source.path.stat().st_ctime_ns == before.st_ctime_ns:  # a file system may count coarsely
        with source.path.open("r+b") as stream:
            stream.write(b"x")
        os.utime(source.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = source.path.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    with pytest.raises(CheckpointError, match="being read: it was written to and its time set back, or its owner"):
        source.check_unchanged()


def test_a_file_that_was_only_read_is_unchanged(source: StreamedFile) -> None:
    os.utime(source.path, ns=(0, 0))
    with opened(source.path, direct=False) as again:
        source.path.read_bytes()
        again.check_unchanged()


def test_a_file_that_grew_is_told(source: StreamedFile) -> None:
    with source.path.open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(CheckpointError, match=f"being read: it grew from {SIZE} to {SIZE + 1} bytes; load the model"):
        source.check_unchanged()


def test_a_file_replaced_by_another_is_told_though_the_old_one_can_still_be_read(source: StreamedFile) -> None:
    other = source.path.with_name("other")
    other.write_bytes(CONTENT)
    os.utime(other, ns=(0, 0))
    other.rename(source.path)
    with pytest.raises(CheckpointError, match="being read: another file has taken its place; load the model again"):
        source.check_unchanged()
    assert source.read_into(aligned(ALIGNMENT), 0, ALIGNMENT) == ALIGNMENT


def test_a_deleted_file_is_told(source: StreamedFile) -> None:
    source.path.unlink()
    with pytest.raises(CheckpointError, match="being read: it was deleted; load the model again"):
        source.check_unchanged()


def test_a_file_that_changed_between_its_header_and_its_opening_is_refused_and_closed(path: Path) -> None:
    identity = file_identity(path)
    path.write_bytes(CONTENT)
    descriptors = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(CheckpointError, match=r"m\.safetensors: changed .*: it was written to"):
        StreamedFile.open(path, identity, direct=False)
    assert len(list(Path("/dev/fd").iterdir())) == descriptors


def test_an_open_file_that_is_not_the_one_of_its_name_is_told(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(CONTENT)
    with (
        StreamedFile(path, os.open(other, os.O_RDONLY), file_identity(path), "a test") as source,
        pytest.raises(CheckpointError, match="another file has taken its place"),
    ):
        source.check_unchanged()


def test_a_missing_file_and_a_pipe_are_errors_and_do_not_wait(path: Path, tmp_path: Path) -> None:
    identity = file_identity(path)
    with pytest.raises(CheckpointNotFoundError, match="gone: no such file"):
        StreamedFile.open(tmp_path / "gone", identity, direct=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: is not a regular file"):
        StreamedFile.open(tmp_path / "pipe", identity, direct=True)


def test_a_closed_file_is_not_read_and_closing_twice_is_one(path: Path) -> None:
    with opened(path, direct=False) as source:
        source.close()
    with pytest.raises(StreamingError, match="this engine is closed and reads no more weights; load it again"):
        source.read_into(aligned(ALIGNMENT), 0, ALIGNMENT)


def test_a_file_system_without_direct_reads_is_read_buffered_and_says_so() -> None:
    path = Path("/proc/version")
    if not path.exists():
        pytest.skip("no /proc, which is known to refuse O_DIRECT")
    with opened(path, direct=True) as source:
        assert not source.is_direct
        assert source.why_buffered == "its file system does not open files with O_DIRECT: Invalid argument"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_a_file_in_memory_is_read_in_whatever_way_it_can_be(tmp_path: Path) -> None:
    """tmpfs refuses O_DIRECT up to Linux 6.5."""
    folder = Path("/dev/shm") / tmp_path.name
    folder.mkdir()
    try:
        with opened(stored(folder), direct=True) as source:
            assert source.is_direct == (source.why_buffered == "")
            space = aligned(8 * ALIGNMENT)
            assert source.read_into(space, 0, 8 * ALIGNMENT) == SIZE
            assert space[:SIZE].numpy().tobytes() == CONTENT
    finally:
        (folder / "m.safetensors").unlink()
        folder.rmdir()


def test_a_refusal_at_the_first_read_makes_the_reads_buffered(path: Path) -> None:
    with opened(path, direct=True) as source:
        if not source.is_direct:
            pytest.skip(source.why_buffered)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    identity = file_identity(path)
    # Memory at an odd address is refused as a file system that wants larger blocks refuses ours.
    why = trial(descriptor, memoryview(mmap.mmap(-1, 2 * ALIGNMENT))[1 : 1 + ALIGNMENT])
    if not why:
        os.close(descriptor)
        pytest.skip("this file system reads to any address")
    assert why == "its file system does not read 4096 bytes with O_DIRECT: Invalid argument"
    with StreamedFile(path, descriptor, identity, why) as source:
        space = torch.zeros(99, dtype=torch.uint8)
        assert source.read_into(space[1:], 5, 98) == 98
        assert space[1:].numpy().tobytes() == CONTENT[5:103]


def test_a_read_error_names_file_place_and_reason() -> None:
    path = Path("/proc/self/mem")  # nothing is mapped at address 0
    if not path.exists():
        pytest.skip("no /proc")
    identity = FileIdentity(device=0, inode=0, size=1 << 30, modified_ns=0, changed_ns=0)
    with StreamedFile(path, os.open(path, os.O_RDONLY), identity, "no disk") as source:
        said = re.escape(f"/proc/self/mem: cannot be read at byte 4096: {os.strerror(errno.EIO)}; check the disk")
        with pytest.raises(CheckpointError, match=said):
            source.read_into(aligned(ALIGNMENT), 4096, ALIGNMENT)
