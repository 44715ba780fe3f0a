"""Host memory locked in place by the driver: what it gives, and what a refusal leaves behind."""

import mmap

import torch

from graphcore.streaming.device.queues import CudaQueues
from graphcore.streaming.pinned_memory import CudaRegistrar, Pins

DEVICE = torch.device("cuda", 0)
NBYTES = 64 << 20


def test_locked_memory_is_known_to_the_driver_and_unlocked_at_the_end() -> None:
    memory = torch.empty(NBYTES, dtype=torch.uint8)
    pins = Pins(CudaRegistrar(DEVICE))
    assert pins.add([memory]) == ""
    assert memory.is_pinned()
    pins.close()
    assert not memory.is_pinned()


def test_parts_of_one_page_are_locked_once() -> None:
    memory = torch.empty(4 * mmap.PAGESIZE, dtype=torch.uint8)
    pins = Pins(CudaRegistrar(DEVICE))
    assert pins.add([memory[:100], memory[100:5000], memory[5000:]]) == ""
    pins.close()


def test_a_refusal_says_why_and_the_next_kernel_is_not_blamed() -> None:
    memory = torch.empty(NBYTES, dtype=torch.uint8)
    pins, again = Pins(CudaRegistrar(DEVICE)), Pins(CudaRegistrar(DEVICE))
    assert pins.add([memory]) == ""
    assert again.add([memory]) != "", "locked twice"
    assert torch.ones(1000, device=DEVICE).sum().item() == 1000
    pins.close()


def test_the_host_goes_on_while_locked_memory_is_copied() -> None:
    memory = torch.ones(8 * NBYTES, dtype=torch.uint8)
    target = torch.zeros(8 * NBYTES, dtype=torch.uint8, device=DEVICE)
    pins, queues = Pins(CudaRegistrar(DEVICE)), CudaQueues(DEVICE)
    assert pins.add([memory]) == ""
    torch.cuda.synchronize(DEVICE)
    queues.copy(memory, target)
    mark = queues.mark("copy")
    was_over = mark.is_over  # 512 MB take ten milliseconds or so
    mark.wait()
    assert not was_over
    assert bool((target == 1).all())
    pins.close()
