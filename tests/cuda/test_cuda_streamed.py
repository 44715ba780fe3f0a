"""Streamed weights on a GPU: the resident model's bits, within the budget by what the device says is free."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from streamed_results import IDS, PROMPTS, differing, results
from tiny_models import BUILDERS

from graphcore import Engine
from graphcore.errors import PlanError

NAMES = tuple(BUILDERS)
# Every setting beside most values of the others.
COMBINATIONS: Sequence[tuple[str, ...]] = (
    ("mode=async", "layer_group_size=1", "prefetch=1", "source=host"),
    ("mode=sync", "layer_group_size=1", "source=host"),
    ("mode=async", "layer_group_size=2", "prefetch=0", "source=disk"),
    ("mode=async", "layer_group_size=3", "prefetch=2", "source=disk"),
    ("mode=async", "layer_group_size=8", "prefetch=1", "source=host", "pinned_memory=false"),
    ("mode=sync", "layer_group_size=2", "source=disk"),
)
NUM_TOKENS = 40


@pytest.fixture
def resident(load_on):
    """A function to resident results on the device."""

    @cache
    def run(folder: Path, graph: str, dtype: str) -> object:
        return results(load_on(folder, graph=graph, dtype=dtype), NUM_TOKENS)

    return run


def overrides_of(combination: Sequence[str]) -> list[str]:
    return [f"streaming.{one}" for one in combination]


@pytest.mark.parametrize("graph", ["eager", "captured"])
@pytest.mark.parametrize(("at", "name"), list(enumerate(NAMES)))
def test_streamed_is_resident_to_the_bit(at: int, name: str, graph: str, tiny_model, load_on, resident) -> None:
    """Each family in one combination, another one captured than eager; dtypes alternate."""
    folder, dtype = tiny_model(name).folder, ("fp32", "bf16")[at % 2]
    combination = COMBINATIONS[(at + 3 * (graph == "captured")) % len(COMBINATIONS)]
    engine: Engine = load_on(folder, *overrides_of(combination), graph=graph, dtype=dtype, streaming="on")
    assert engine.plan.is_streaming
    assert differing(results(engine, NUM_TOKENS), resident(folder, graph, dtype)) == []


@pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)
def test_every_combination_of_one_model(combination: Sequence[str], tiny_model, load_on, resident) -> None:
    folder = tiny_model("llama3").folder
    engine = load_on(folder, *overrides_of(combination), graph="captured", dtype="bf16", streaming="on")
    assert differing(results(engine, NUM_TOKENS), resident(folder, "captured", "bf16")) == []


def test_auto_keeps_more_as_the_budget_grows_and_gives_the_same(tiny_model, load_on, resident) -> None:
    folder = tiny_model("llama3").folder
    expected = resident(folder, "captured", "fp32")
    with pytest.raises(PlanError, match=r"the smallest streaming.memory_budget that works") as refusal:
        load_on(folder, "streaming.memory_budget=1KiB", streaming="auto")
    smallest = int(str(refusal.value).rpartition(" is ")[2].split(" bytes")[0])
    step = max(load_on(folder, streaming="on").plan.group_nbytes[1:])
    counts = []
    for extra in (0, step, 2 * step, 1 << 30):
        engine = load_on(folder, f"streaming.memory_budget={smallest + extra}", streaming="auto")
        counts.append(len(engine.plan.streamed))
        assert engine.plan.total_nbytes <= smallest + extra
        assert differing(results(engine, NUM_TOKENS), expected) == []
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_packed_weights_stream_to_the_bit(quant: str, tiny_model, load_on) -> None:
    folder = tiny_model("llama3").folder
    prompt = PROMPTS[0]
    engines = [load_on(folder, dtype="bf16", quant=quant, streaming=way) for way in ("off", "on")]
    logits = [engine.logits(IDS) for engine in engines]
    assert torch.equal(logits[0], logits[1])
    tokens = [engine.generate([prompt], max_new_tokens=30, ignore_eos=True)[0].token_ids for engine in engines]
    assert tokens[0] == tokens[1]


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


@pytest.mark.parametrize("policy", ["on", "auto"])
def test_free_memory_drops_by_no_more_than_the_budget(policy: str, load_on) -> None:
    """Large enough that a graph's pool, a kernel's code or an allocator's rounding would be seen."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "vocab_size": 32000}
    settings = [f"++model.random_config.{key}={value}" for key, value in shape.items()]
    budget = 700 << 20
    warm = load_on(Path("random:bf16"), "model=llama3", *settings, "model.num_hidden_layers=1", dtype="bf16")
    warm.generate([[1, 2, 3]], max_new_tokens=8)  # what CUDA takes for kernels and libraries is there from now on
    warm.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with least_free() as least:
        more = ("model=llama3", *settings, f"streaming.memory_budget={budget}", "prefill_chunk=128")
        engine = load_on(Path("random:bf16"), *more, dtype="bf16", streaming=policy)
        engine.generate([list(range(1, 200))], max_new_tokens=40, ignore_eos=True)
    assert engine.plan.is_streaming
    assert engine.plan.total_nbytes <= budget
    assert before - least[0] <= budget


def test_a_file_that_shrinks_in_mid_stream_is_one_error_and_the_device_goes_on(tiny_model, load_on, tmp_path) -> None:
    import os
    import shutil

    from graphcore.errors import CheckpointError

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
