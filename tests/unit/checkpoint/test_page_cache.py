"""What the page cache holds of a file: all that was just written, nothing after it was told to forget."""

import os
from pathlib import Path

import pytest

from graphcore.checkpoint.page_cache import cached_share
from graphcore.checkpoint.span import Span
from graphcore.errors import CheckpointNotFoundError

PAGE = os.sysconf("SC_PAGE_SIZE")
NUM_PAGES = 64


def forget(path: Path) -> None:
    """Drop the file's pages from the page cache, or skip the test where a file system has nowhere else for them."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share([Span(path, 0, NUM_PAGES * PAGE)]) == 1.0:
        pytest.skip("this file system keeps every page")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    path.write_bytes(os.urandom(NUM_PAGES * PAGE))
    return path


def test_a_file_just_written_is_cached_and_a_forgotten_one_is_not(path: Path) -> None:
    whole = [Span(path, 0, NUM_PAGES * PAGE)]
    assert cached_share(whole) == 1.0
    forget(path)
    assert cached_share(whole) == 0.0
    assert cached_share(whole) == 0.0, "asking has read the file"


def test_only_the_pages_of_the_spans_count(path: Path) -> None:
    forget(path)
    with path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        os.pread(stream.fileno(), 2 * PAGE, 8 * PAGE)
    assert cached_share([Span(path, 0, NUM_PAGES * PAGE)]) == 2 / NUM_PAGES
    assert cached_share([Span(path, 9 * PAGE - 8, 16)]) == 1.0
    assert cached_share([Span(path, 10 * PAGE - 8, 16)]) == 0.5
    assert cached_share([Span(path, 8 * PAGE, PAGE), Span(path, 20 * PAGE, 3 * PAGE)]) == 0.25


def test_several_files_are_weighed_by_their_pages(path: Path, tmp_path: Path) -> None:
    forget(path)
    other = tmp_path / "other"
    other.write_bytes(bytes(PAGE))
    assert cached_share([Span(other, 0, PAGE), Span(path, 0, 3 * PAGE)]) == 0.25


def test_a_span_after_the_end_of_a_file_that_shrank_is_not_cached(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(PAGE)
    assert cached_share([Span(path, 0, 4 * PAGE)]) == 0.25
    assert cached_share([Span(path, 2 * PAGE, PAGE)]) == 0.0
    with path.open("r+b") as stream:
        stream.truncate(0)
    assert cached_share([Span(path, 0, PAGE)]) == 0.0


def test_no_spans_are_not_cached() -> None:
    assert cached_share([]) == 0.0


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="gone: no such file"):
        cached_share([Span(tmp_path / "gone", 0, 8)])
