from pathlib import Path

import pytest
import torch
from byte_conversions import FILE, ByteConversion, conversion
from support.fake_sources import FakeSource, numbered_bytes

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.errors import CheckpointError
from graphcore.host_pages import shared_pages
from graphcore.streaming.fill_jobs import ALIGNMENT, GAP, FillJob, copy_jobs, file_jobs, read_job, read_straight
from graphcore.weights.conversion import CONVERSION_NBYTES, RowConversion

OTHER = Path("other.safetensors")


def done(jobs: list[FillJob], *sources: FakeSource) -> None:
    """Do the jobs as a thread does."""
    for job in jobs:
        buffer = shared_pages(job.room)
        read_job(job, {source.path: source for source in sources}, buffer)
        for one, places in job.conversions:
            one.write([buffer[at : at + span.nbytes] for at, span in zip(places, one.spans, strict=True)], 1)


def test_pieces_that_touch_are_read_at_once() -> None:
    (job,) = file_jobs([conversion(5000, 100), conversion(5100, 900)])
    assert [(read.offset, read.nbytes) for read in job.reads] == [(4096, 4096)]
    assert job.nbytes == 1000


def test_pieces_are_read_in_the_order_of_the_file_whatever_order_they_are_given_in() -> None:
    """Layers 0, 1, 10, 11, 2 ... of a file that is sorted by name: their groups' reads follow the bytes."""
    far = GAP + ALIGNMENT
    jobs = file_jobs([conversion(far * at, 10) for at in (4, 0, 3, 1, 2)])
    assert [job.reads[0].offset // far for job in jobs] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("gap", "num_jobs"), [(0, 1), (GAP, 1), (GAP + 1, 2)])
def test_a_small_gap_is_read_along_and_a_larger_one_is_not(gap: int, num_jobs: int) -> None:
    jobs = file_jobs([conversion(0, 777), conversion(777 + gap, 10)])
    assert len(jobs) == num_jobs


def test_no_job_reads_more_than_its_thread_has_room_for() -> None:
    sizes = [
        CONVERSION_NBYTES,
        1,
        CONVERSION_NBYTES - 1,
        3,
        CONVERSION_NBYTES // 2,
        CONVERSION_NBYTES // 2,
        CONVERSION_NBYTES // 2,
    ]
    begins = [sum(sizes[:at]) + 13 for at in range(len(sizes))]
    jobs = file_jobs([conversion(begin, nbytes) for begin, nbytes in zip(begins, sizes, strict=True)])
    assert max(job.room for job in jobs) <= CONVERSION_NBYTES + 2 * ALIGNMENT
    assert sum(job.nbytes for job in jobs) == sum(sizes)


@pytest.mark.parametrize("shift", [0, 1, 7, 4095])
def test_every_piece_gets_its_own_bytes_at_any_offset(shift: int) -> None:
    """Odd offsets, gaps, neighbours, a conversion that ends with the file."""
    content = numbered_bytes(100_000 + shift)
    spans = [(shift + begin, nbytes) for begin, nbytes in [(0, 1), (1, 4095), (4097, 5), (9000, 30_001), (99_990, 10)]]
    conversions = [conversion(begin, nbytes) for begin, nbytes in reversed(spans)]
    done(file_jobs(conversions), FakeSource(FILE, content))
    for one in conversions:
        (span,) = one.spans
        assert torch.equal(one.out, content[span.offset : span.end]), span


def test_a_layer_across_two_shards_is_read_from_both() -> None:
    first, second = FakeSource(FILE, numbered_bytes(9000, 1)), FakeSource(OTHER, numbered_bytes(9000, 2))
    conversions = [conversion(8000, 1000), conversion(0, 500, OTHER), conversion(500, 500, OTHER)]
    jobs = file_jobs(conversions)
    assert [{read.file for read in job.reads} for job in jobs] == [{FILE}, {OTHER}]
    done(jobs, first, second)
    assert torch.equal(conversions[0].out, first.content[8000:])
    assert torch.equal(torch.cat([conversions[1].out, conversions[2].out]), second.content[:1000])


@pytest.mark.parametrize(
    ("first", "second"),
    [((100, 4900), (5000, 4000)), ((5000, 4000), (100, 4900)), ((0, 10), (10, 9000)), ((0, 50_000), (90_000, 1))],
)
def test_a_piece_of_several_spans_gets_the_bytes_of_each(first: tuple[int, int], second: tuple[int, int]) -> None:
    """Blocks and their scales: runs of one file that touch, so that the reads around them overlap."""
    content = numbered_bytes(100_000)
    spans = (FileSpan(FILE, *first), FileSpan(FILE, *second))
    one = ByteConversion("weight", spans, torch.zeros(first[1] + second[1], dtype=torch.uint8))
    done(file_jobs([one]), FakeSource(FILE, content))
    assert torch.equal(one.out, torch.cat([content[span.offset : span.end] for span in spans]))


def test_a_read_that_comes_short_is_an_error_and_not_a_weight() -> None:
    jobs = file_jobs([conversion(0, 9000)])
    with pytest.raises(CheckpointError, match=r"^model.safetensors: 8900 of 9000 bytes came from byte 0 on; check the"):
        done(jobs, FakeSource(FILE, numbered_bytes(9000), lacking=100))


@pytest.mark.parametrize("nbytes", [1, 256, CONVERSION_NBYTES, 2 * CONVERSION_NBYTES + 77])
def test_copies_from_memory_bring_every_byte(nbytes: int) -> None:
    source, out = numbered_bytes(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    jobs = copy_jobs("layer 1", source, out)
    assert sum(job.nbytes for job in jobs) == nbytes
    done(jobs)
    assert torch.equal(out, source)


def test_bytes_of_a_cached_file_go_straight_to_their_place_and_what_is_made_of_them_through_a_buffer() -> None:
    content, out = numbered_bytes(200), torch.zeros(12, 4, dtype=torch.bfloat16)
    info = TensorInfo("stored", (20, 4), "bf16", FILE, 0, 160)
    plain = RowConversion("w", (FileSpan(FILE, 32, 64),), info, None, out, 4, 12, 64)
    made = conversion(100, 10)
    jobs = file_jobs([made, plain], is_cached=True)
    (straight,) = [job for job in jobs if job.straight]
    assert (straight.reads, straight.conversions, straight.room, straight.nbytes) == ((), (), 0, 64)
    assert [one for job in jobs for one, _ in job.conversions] == [made]
    read_straight(straight, {FILE: FakeSource(FILE, content, is_direct=False)})
    assert torch.equal(out[4:].view(torch.uint8).flatten(), content[32:96])
    assert not out[:4].any()
    with pytest.raises(CheckpointError, match="61 of 64 bytes came from byte 32 on"):
        read_straight(straight, {FILE: FakeSource(FILE, content, lacking=3, is_direct=False)})


def test_rows_that_are_cast_or_packed_have_no_place_for_their_stored_bytes() -> None:
    info = TensorInfo("stored", (20, 4), "f32", FILE, 0, 320)
    cast = RowConversion("w", (FileSpan(FILE, 0, 128),), info, None, torch.zeros(8, 4, dtype=torch.bfloat16), 0, 8, 64)
    assert cast.plain_place is None
    assert all(not job.straight for job in file_jobs([cast], is_cached=True))
