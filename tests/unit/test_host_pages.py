"""Memory that begins at a page: for weights, caches and buffers."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from graphcore import Engine
from graphcore.errors import PlanError
from graphcore.host_pages import private_pages, shared_pages, zeros
from graphcore.kvcache import buffers

TINY = Path(__file__).parents[1] / "golden" / "tiny"
CPU = torch.device("cpu")


@pytest.mark.parametrize("pages_of", [private_pages, shared_pages])
@pytest.mark.parametrize("nbytes", [0, 1, 5000, 3 << 20])
def test_memory_begins_at_a_page_and_is_zeroed(pages_of: type, nbytes: int) -> None:
    memory = pages_of(nbytes)
    assert len(memory) >= nbytes
    assert memory.data_ptr() % mmap.PAGESIZE == 0 or not len(memory)
    assert not memory.any()


def test_a_fork_writes_its_own_private_pages_and_the_same_shared_ones() -> None:
    private, shared = private_pages(100), shared_pages(100)
    child = os.fork()
    if not child:
        private[0], shared[0] = 1, 1
        os._exit(0)
    os.waitpid(child, 0)
    assert (int(private[0]), int(shared[0])) == (0, 1)


def test_a_tensor_of_zeros_has_the_shape_and_dtype() -> None:
    cache = zeros((3, 5, 7), torch.bfloat16, CPU)
    assert (cache.shape, cache.dtype, cache.is_contiguous()) == ((3, 5, 7), torch.bfloat16, True)
    assert not cache.any()
    assert zeros((0, 4), torch.float32, CPU).shape == (0, 4)
    assert zeros((2, 4), torch.float32, torch.device("meta")).is_meta


class NoHugePages(mmap.mmap):
    """Memory of a system that was built without huge pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(22, "Invalid argument")


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", NoHugePages)
    assert not private_pages(5 << 20).any()


@pytest.mark.parametrize("pages_of", [private_pages, shared_pages])
def test_memory_that_cannot_be_had_is_an_error_with_its_size(pages_of: type) -> None:
    with pytest.raises(MemoryError, match=rf"{1 << 60} bytes of RAM: Cannot allocate memory"):
        pages_of(1 << 60)


def test_a_model_without_room_for_its_caches_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise MemoryError("4096 bytes of RAM: Cannot allocate memory")

    monkeypatch.setattr(buffers, "zeros", refuse)
    with pytest.raises(PlanError, match=r"4096 bytes of RAM: Cannot allocate memory.*end what else uses it"):
        Engine.load(TINY / "qwen3", dtype="fp32", graph="eager", device="cpu")
