"""Which GPU a rank has, and its part of the memory."""

import pytest
import torch

from graphcore.device import device_of_rank
from graphcore.errors import ConfigError
from graphcore.planning.machine import Machine, Memory


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("cuda", ["cuda:0", "cuda:1", "cuda:0"]),
        ("auto", ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:0", ["cuda:0"] * 3),
        ("cuda:1", ["cuda:1"] * 3),
        ("cpu", ["cpu"] * 3),
    ],
)
def test_each_local_rank_has_the_gpu_of_its_number_and_one_that_is_named_is_kept(name: str, devices: list[str]) -> None:
    assert [str(device_of_rank(name, local_rank)) for local_rank in range(3)] == devices


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of_rank("auto", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device=cuda was asked for, but torch .* sees no CUDA device"):
        device_of_rank("cuda", 1)


def test_ranks_share_the_memory_of_their_gpu_and_that_of_the_machine() -> None:
    machine = Machine(torch.device("cuda", 0), Memory("cuda:0", 80, 100), 60, is_here=True)
    part = machine.shared(4, on_device=2)
    assert (part.memory.free_nbytes, part.memory.physical_nbytes, part.ram_nbytes) == (40, 100, 15)
