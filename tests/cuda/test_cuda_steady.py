"""After warm-up a decode loop compiles nothing, captures nothing and allocates nothing."""

import pytest
import torch
from support.tiny_models import TinyModel

from graphcore import Engine

NAMES = ("llama3", "gemma3", "gpt_oss", "bitnet")
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every capture of a graph that begins while the test runs."""
    begun: list[object] = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def counted(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
        begun.append(graph)
        return begin(graph, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", counted)
    return begun


def allocations() -> dict[str, int]:
    """Return how often torch's allocator was asked, and how often it asked the driver, so far."""
    stats = torch.cuda.memory_stats()
    return {name: stats[f"{name}.all.allocated"] for name in ("allocation", "segment")}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_compiles_and_nothing_is_captured_again(name: str, tiny_model, load_on, captures) -> None:
    tiny: TinyModel = tiny_model(name)
    engine: Engine = load_on(tiny.folder, graph="captured")
    prompts = [tiny.ids[0, :33].tolist(), tiny.ids[1, :1].tolist(), tiny.ids[1, :17].tolist()]
    for batch in (prompts[:1], prompts):
        engine.warm_up(len(batch))
        for sampling in ({}, SAMPLED):
            engine.generate(batch, max_new_tokens=4, ignore_eos=True, **sampling)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    known = len(captures)
    assert known >= 2, "the first generations capture a graph for each way of choosing"
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (1, 2, 16, 33, 45):
            engine.generate([tiny.ids[0, :length].tolist()], max_new_tokens=70, ignore_eos=True)
        engine.generate(prompts, max_new_tokens=70, ignore_eos=True)
        engine.generate(prompts[:2], max_new_tokens=9, ignore_eos=True)
        engine.generate(prompts, max_new_tokens=9, ignore_eos=True, **SAMPLED)
        engine.generate(prompts[:1], max_new_tokens=9, ignore_eos=True, **{**SAMPLED, "temperature": 0.3, "seed": 9})
    assert len(captures) == known
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_a_decode_loop_allocates_nothing(name: str, sampling: dict[str, float], tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    engine: Engine = load_on(tiny.folder, graph="captured")
    prompt = tiny.ids[0, :20].tolist()
    list(engine.stream(prompt, max_new_tokens=40, **sampling))
    events = engine.stream(prompt, max_new_tokens=200, **sampling)
    for _ in range(20):
        next(events)
    before = allocations()
    for _ in range(100):
        next(events)
    assert allocations() == before
    events.close()
