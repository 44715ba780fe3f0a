"""What the page cache holds of a file: all that was just written, nothing after it was told to forget."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.page_cache import cached_share, runs_of
from graphcore.errors import CheckpointNotFoundError

PAGE = os.sysconf("SC_PAGE_SIZE")
NUM_PAGES = 64


def forget(path: Path) -> None:
    """Drop the file's pages from the page cache, or skip the test where a file system has nowhere else for them."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share([FileSpan(path, 0, NUM_PAGES * PAGE)]) == 1.0:
        pytest.skip("this file system keeps every page")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    path.write_bytes(os.urandom(NUM_PAGES * PAGE))
    return path


def test_a_file_just_written_is_cached_and_a_forgotten_one_is_not(path: Path) -> None:
    whole = [FileSpan(path, 0, NUM_PAGES * PAGE)]
    assert cached_share(whole) == 1.0
    forget(path)
    assert cached_share(whole) == 0.0
    assert cached_share(whole) == 0.0, "asking has read the file"


def test_only_the_pages_of_the_spans_count(path: Path) -> None:
    forget(path)
    with path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        os.pread(stream.fileno(), 2 * PAGE, 8 * PAGE)
    assert cached_share([FileSpan(path, 0, NUM_PAGES * PAGE)]) == 2 / NUM_PAGES
    assert cached_share([FileSpan(path, 9 * PAGE - 8, 16)]) == 1.0
    assert cached_share([FileSpan(path, 10 * PAGE - 8, 16)]) == 0.5
    assert cached_share([FileSpan(path, 8 * PAGE, PAGE), FileSpan(path, 20 * PAGE, 3 * PAGE)]) == 0.25


def test_several_files_are_weighed_by_their_pages(path: Path, tmp_path: Path) -> None:
    forget(path)
    other = tmp_path / "other"
    other.write_bytes(bytes(PAGE))
    assert cached_share([FileSpan(other, 0, PAGE), FileSpan(path, 0, 3 * PAGE)]) == 0.25


def test_a_span_after_the_end_of_a_file_that_shrank_is_not_cached(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(PAGE)
    assert cached_share([FileSpan(path, 0, 4 * PAGE)]) == 0.25
    assert cached_share([FileSpan(path, 2 * PAGE, PAGE)]) == 0.0
    with path.open("r+b") as stream:
        stream.truncate(0)
    assert cached_share([FileSpan(path, 0, PAGE)]) == 0.0


def test_no_spans_are_not_cached() -> None:
    assert cached_share([]) == 0.0


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="gone: no such file"):
        cached_share([FileSpan(tmp_path / "gone", 0, 8)])


ONE, TWO = Path("one.safetensors"), Path("two.safetensors")


def stored_layers(sizes: Sequence[tuple[int, int]]) -> dict[int, list[FileSpan]]:
    """Return each layer's spans in a file that has (layer, nbytes) one after the other from byte 88 on."""
    layers: dict[int, list[FileSpan]] = {}
    offset = 88
    for layer, nbytes in sizes:
        layers.setdefault(layer, []).append(FileSpan(ONE, offset, nbytes))
        offset += nbytes
    return layers


def test_spans_that_touch_become_one_whatever_their_order() -> None:
    assert runs_of([FileSpan(ONE, 30, 5), FileSpan(ONE, 10, 10), FileSpan(ONE, 20, 10)]) == (FileSpan(ONE, 10, 25),)


def test_a_gap_of_one_byte_parts_two_runs() -> None:
    assert runs_of([FileSpan(ONE, 0, 9), FileSpan(ONE, 10, 2)]) == (FileSpan(ONE, 0, 9), FileSpan(ONE, 10, 2))


def test_nothing_and_empty_spans_are_no_runs() -> None:
    assert runs_of([]) == runs_of([FileSpan(ONE, 8, 0)]) == ()
    assert runs_of([FileSpan(ONE, 0, 4), FileSpan(ONE, 6, 0), FileSpan(ONE, 8, 4)]) == (
        FileSpan(ONE, 0, 4),
        FileSpan(ONE, 8, 4),
    )


def test_a_layer_sorted_by_dtype_is_one_run_for_each_dtype() -> None:
    """Files as gpt-oss has them: first all layers' bfloat16, then all layers' bytes."""
    order = [(layer, nbytes) for nbytes in (24, 4096) for layer in (0, 1, 2) for _ in range(3)]
    assert runs_of(stored_layers(order)[1]) == (
        FileSpan(ONE, 88 + 72, 72),
        FileSpan(ONE, 88 + 216 + 3 * 4096, 3 * 4096),
    )


def test_layers_in_the_order_of_their_names_are_runs_where_they_stand() -> None:
    order = sorted(range(12), key=str)
    assert order[:4] == [0, 1, 10, 11]
    layers = stored_layers([(layer, 40) for layer in order for _ in range(2)])
    assert runs_of(layers[0] + layers[1]) == (FileSpan(ONE, 88, 160),)
    assert runs_of(layers[1] + layers[2]) == (FileSpan(ONE, 88 + 80, 80), FileSpan(ONE, 88 + 320, 80))


def test_a_layer_across_two_shards_is_a_run_in_each() -> None:
    spans = [FileSpan(TWO, 40, 8), FileSpan(ONE, 992, 8), FileSpan(ONE, 984, 8), FileSpan(TWO, 48, 16)]
    assert runs_of(spans) == (FileSpan(ONE, 984, 16), FileSpan(TWO, 40, 24))


def test_the_same_offsets_in_two_files_do_not_touch() -> None:
    assert runs_of([FileSpan(ONE, 0, 8), FileSpan(TWO, 8, 8)]) == (FileSpan(ONE, 0, 8), FileSpan(TWO, 8, 8))


def test_offsets_that_are_multiples_of_8_only_stay_as_they_are() -> None:
    assert runs_of([FileSpan(ONE, 4104, 24), FileSpan(ONE, 4136, 8)]) == (
        FileSpan(ONE, 4104, 24),
        FileSpan(ONE, 4136, 8),
    )


def test_spans_that_several_weights_share_come_once() -> None:
    """q, k and v out of one fused tensor; a part of it; a span that ends inside a longer one before it."""
    fused = FileSpan(ONE, 100, 300)
    assert runs_of([fused, fused, fused, FileSpan(ONE, 200, 50), FileSpan(ONE, 350, 100)]) == (FileSpan(ONE, 100, 350),)


def test_the_runs_of_a_files_tensors_are_all_of_it_but_the_header(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {
        f"layers.{index}.{kind}": torch.ones(index + 1, dtype=kind_of)
        for index in range(12)
        for kind, kind_of in (("w", torch.bfloat16), ("b", torch.float32))
    }
    save_file(tensors, path)
    checkpoint = open_checkpoint(path)
    (run,) = runs_of(span for name in checkpoint.tensors for span in checkpoint.spans(name))
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert run == FileSpan(path, 8 + header, path.stat().st_size - 8 - header)
