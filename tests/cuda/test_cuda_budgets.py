"""Streaming on a GPU keeps to its budget, by what the device says is free, and to what may be locked."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.streaming import PROMPTS, differing, results

from graphcore.errors import CheckpointError, PlanError
from graphcore.gpu_memory import device_fence
from graphcore.streaming.pinned_memory import CudaRegistrar

NUM_TOKENS = 40


def test_auto_keeps_more_as_the_budget_grows_and_gives_the_same(tiny_model, load_on, resident) -> None:
    folder = tiny_model("llama3").folder
    expected = resident(folder, "captured", "fp32")
    with pytest.raises(PlanError, match=r"the smallest streaming.memory_budget that works") as refusal:
        load_on(folder, "streaming.memory_budget=1KiB", streaming="auto")
    smallest = int(str(refusal.value).rpartition(" is ")[2].split(" bytes")[0])
    step = max(load_on(folder, streaming="on").plan.groups.group_nbytes[1:])
    counts = []
    for extra in (0, step, 2 * step, 1 << 30):
        engine = load_on(folder, f"streaming.memory_budget={smallest + extra}", streaming="auto")
        counts.append(len(engine.plan.groups.streamed))
        assert engine.plan.total_nbytes <= smallest + extra
        assert differing(results(engine, NUM_TOKENS), expected) == []
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


@contextmanager
def least_free() -> Iterator[list[int]]:
    """Watch the device's free memory; the list's only item is the least that was seen."""
    least, ended = [torch.cuda.mem_get_info()[0]], threading.Event()

    def sample() -> None:
        while not ended.wait(0.002):
            least[0] = min(least[0], torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield least
    finally:
        ended.set()
        thread.join()


SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "vocab_size": 32000}
LARGE = ("model=llama3", *(f"++model.random_config.{key}={value}" for key, value in SHAPE.items()))


@pytest.mark.parametrize("policy", ["on", "off"])
def test_a_closed_engine_returns_its_memory_to_the_driver(policy: str, load_on) -> None:
    """Large enough for a second model to be refused if the first one's weights were still there."""
    warm = load_on(Path("random:bf16"), *LARGE, dtype="bf16", streaming=policy)
    warm.generate([[1, 2, 3]], max_new_tokens=8, ignore_eos=True)
    warm.close()  # what CUDA takes for kernels and libraries is there from now on
    before = torch.cuda.mem_get_info()[0]
    engine = load_on(Path("random:bf16"), *LARGE, dtype="bf16", streaming=policy)
    engine.generate([[1, 2, 3]], max_new_tokens=8, ignore_eos=True)
    assert before - torch.cuda.mem_get_info()[0] > 100 << 20
    engine.close()
    assert before - torch.cuda.mem_get_info()[0] < 64 << 20  # a graph's executables and an allocator's rounding


@pytest.mark.parametrize("policy", ["on", "auto"])
def test_free_memory_drops_by_no_more_than_the_budget(policy: str, load_on) -> None:
    """Large enough that a graph's pool, a kernel's code or an allocator's rounding would be seen."""
    budget = 1 << 30
    warm = load_on(Path("random:bf16"), *LARGE, "model.num_hidden_layers=1", dtype="bf16")
    warm.generate([[1, 2, 3]], max_new_tokens=8)  # what CUDA takes for kernels and libraries is there from now on
    warm.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with least_free() as least:
        more = (*LARGE, f"streaming.memory_budget={budget}", "prefill_chunk=128")
        engine = load_on(Path("random:bf16"), *more, dtype="bf16", streaming=policy)
        engine.generate([list(range(1, 200))], max_new_tokens=40, ignore_eos=True)
    assert engine.plan.is_streaming
    assert engine.plan.total_nbytes <= budget
    assert before - least[0] <= budget


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_what_the_machine_does_not_lock_streams_all_the_same(
    share: float, tiny_model, load_on, resident, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota of locked memory, of some share of what streams: the rest goes through a ring, or unlocked."""
    folder = tiny_model("llama3").folder
    quota = int(share * load_on(folder, streaming="on").plan.groups.streamed_nbytes)
    register, locked = CudaRegistrar.register, []

    def limited(registrar: CudaRegistrar, address: int, nbytes: int) -> str:
        if sum(locked) + nbytes > quota:
            return "the quota is used up"
        locked.append(nbytes)
        return register(registrar, address, nbytes)

    monkeypatch.setattr(CudaRegistrar, "register", limited)
    engine = load_on(folder, "streaming.source=host", graph="captured", dtype="bf16", streaming="on")
    assert any("quota is used up" in note for note in engine.notes)
    assert differing(results(engine, NUM_TOKENS), resident(folder, "captured", "bf16")) == []


def test_a_fence_holds_and_a_model_behind_it_is_refused_with_the_way_out(load_on) -> None:
    with device_fence(torch.device("cuda", 0), 256 << 20) as free:
        assert free < 300 << 20
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
        with pytest.raises(PlanError, match="streaming"):
            load_on(Path("random:bf16"), "model=llama3", dtype="bf16")
    assert torch.cuda.mem_get_info()[0] > 300 << 20


def test_a_file_that_shrinks_in_mid_stream_is_one_error_and_the_device_goes_on(tiny_model, load_on, tmp_path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama3").folder, tmp_path / "llama3"))
    engine = load_on(folder, "streaming.source=disk", streaming="on")
    events = engine.stream(PROMPTS[0], max_new_tokens=100)
    for _ in range(5):
        next(events)
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(CheckpointError, match=r"it shrank|the file now ends at"):
        list(events)
    engine.close()
    healthy = load_on(tiny_model("llama3").folder, streaming="on")
    assert len(healthy.generate([PROMPTS[0]], max_new_tokens=5, ignore_eos=True)[0].token_ids) == 5
