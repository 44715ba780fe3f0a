"""model.fallback=transformers with weights that move: the bits of the same model with all weights in place."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from support.fallback_models import ISSUE, MORE, FallbackModel, save_fallback
from support.queues import Paced
from support.streaming import collect_until, fill_threads
from torch import Tensor

from graphcore import Engine
from graphcore.planning.tier import host_nbytes

pytestmark = pytest.mark.thorough

PAGE = 4096  # bytes
VOCAB = 1280  # so that the head has slices: a layer of these models has 100 to 200 KB, the head 320 KB
SIZES = ["context_length=128", "batch_size=2", "model.fallback=transformers", "streaming.memory_budget=64MB"]
STREAMS = {
    "async": ("on", ()),
    "sync": ("on", ("streaming.mode=sync",)),
    "pairs": ("on", ("streaming.layer_group_size=2",)),
    "all_layers": ("on", ("streaming.layer_group_size=9",)),
    "ahead": ("on", ("streaming.prefetch=3",)),
    "host": ("on", ("streaming.source=host",)),
}


@pytest.fixture(scope="module")
def fallback_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FallbackModel]:
    @cache
    def make(name: str) -> FallbackModel:
        return save_fallback(name, tmp_path_factory.mktemp(name), vocab_size=VOCAB)

    return make


@pytest.fixture(scope="module")
def resident(fallback_model: Callable[[str], FallbackModel]) -> Callable[[str], tuple[Tensor, list[tuple[int, ...]]]]:
    """Logits, and 40 greedy tokens of each of two sequences, with all weights in place."""

    @cache
    def run(name: str) -> tuple[Tensor, list[tuple[int, ...]]]:
        sizes = [one for one in SIZES if "budget" not in one]
        with Engine.load(fallback_model(name).folder, dtype="fp32", device="cpu", overrides=sizes) as engine:
            assert not engine.plan.is_streaming
            return outputs(engine, fallback_model(name).ids)

    return run


def outputs(engine: Engine, ids: Tensor) -> tuple[Tensor, list[tuple[int, ...]]]:
    logits = engine.logits(ids)
    return logits, [one.token_ids for one in engine.generate(ids.tolist(), max_new_tokens=40)]


@pytest.mark.parametrize(
    ("name", "stream"), [*((name, stream) for name in ISSUE for stream in STREAMS), *((name, "async") for name in MORE)]
)
def test_streamed_is_resident(
    name: str,
    stream: str,
    fallback_model: Callable[[str], FallbackModel],
    resident: Callable[[str], tuple[Tensor, list[tuple[int, ...]]]],
) -> None:
    policy, keys = STREAMS[stream]
    model = fallback_model(name)
    with Engine.load(model.folder, dtype="fp32", device="cpu", streaming=policy, overrides=[*SIZES, *keys]) as engine:
        assert not engine.plan.groups.is_embedding_resident
        assert len(engine.plan.groups.streamed) == engine.plan.groups.num_layer_groups + len(
            engine.plan.groups.head_slices
        )
        logits, tokens = outputs(engine, model.ids)
    expected = resident(name)
    assert torch.equal(logits, expected[0])
    assert tokens == expected[1]


@pytest.mark.parametrize("name", ISSUE)
def test_the_head_has_slices_and_gives_transformers_logits(
    name: str,
    fallback_model: Callable[[str], FallbackModel],
    resident: Callable[[str], tuple[Tensor, list[tuple[int, ...]]]],
) -> None:
    model = fallback_model(name)
    with Engine.load(model.folder, dtype="fp32", device="cpu", streaming="on", overrides=SIZES) as engine:
        assert len(engine.plan.groups.head_slices) > 1
        assert max(engine.plan.groups.head_slices) <= engine.plan.groups.slot_nbytes
    # A product of fewer rows may add up in another order: 1e-5, of logits of order one.
    torch.testing.assert_close(resident(name)[0], model.outputs().logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["phi3", "granite"])  # untied and tied
def test_every_budget_that_is_planned_for_gives_the_same_bits(
    name: str,
    fallback_model: Callable[[str], FallbackModel],
    resident: Callable[[str], tuple[Tensor, list[tuple[int, ...]]]],
) -> None:
    model = fallback_model(name)
    streamed = set()
    waits = [*SIZES, "streaming.source=host"]  # without buffers for reads, which are larger than these models
    with Engine.load(model.folder, dtype="fp32", device="cpu", streaming="on", overrides=waits) as engine:
        least, weights = engine.plan.total_nbytes, sum(engine.plan.groups.group_nbytes)
    for budget in range(least, least + weights, weights // 6):
        keys = [*waits, f"streaming.memory_budget={budget}"]
        with Engine.load(model.folder, dtype="fp32", device="cpu", streaming="auto", overrides=keys) as engine:
            assert engine.plan.total_nbytes <= budget
            streamed.add(len(engine.plan.groups.streamed))
            logits, _ = outputs(engine, model.ids)
        assert torch.equal(logits, resident(name)[0]), f"budget {budget}"
    assert len(streamed) > 2


def test_hidden_states_attentions_and_forward_are_there_while_weights_move(
    fallback_model: Callable[[str], FallbackModel],
) -> None:
    model = fallback_model("olmo2")
    keys = [*SIZES, "model.attention=eager"]
    with Engine.load(model.folder, dtype="fp32", device="cpu", streaming="on", overrides=keys) as engine:
        _, layers, weights = engine.logits(model.ids, output_hidden_states=True, output_attentions=True)
        expected = model.outputs(output_hidden_states=True, output_attentions=True)
        assert all(torch.equal(*pair) for pair in zip(layers[:-1], expected.hidden_states[:-1], strict=True))
        assert all(torch.equal(*pair) for pair in zip(weights, expected.attentions, strict=True))
        assert torch.equal(engine.forward(layers[0]), layers[-1])


def test_a_budget_that_is_too_small_is_refused_with_the_one_that_works(
    fallback_model: Callable[[str], FallbackModel],
) -> None:
    from graphcore.errors import PlanError

    model = fallback_model("phi3")
    keys = [*SIZES, "streaming.memory_budget=1MB"]
    with pytest.raises(PlanError, match=r"smallest streaming.memory_budget that works") as refusal:
        Engine.load(model.folder, dtype="fp32", device="cpu", streaming="on", overrides=keys)
    least = int(str(refusal.value).partition("context_length=128 is ")[2].partition(" bytes")[0])
    keys = [*SIZES, f"streaming.memory_budget={least}"]
    with Engine.load(model.folder, dtype="fp32", device="cpu", streaming="on", overrides=keys) as engine:
        assert engine.plan.total_nbytes == least


@pytest.mark.parametrize("name", ["phi3", "granite"])  # untied and tied
def test_weights_that_wait_in_ram_take_the_bytes_that_are_planned(
    name: str, fallback_model: Callable[[str], FallbackModel]
) -> None:
    keys = [*SIZES, "streaming.source=host"]
    with Engine.load(fallback_model(name).folder, dtype="fp32", device="cpu", streaming="on", overrides=keys) as engine:
        planned = host_nbytes(engine.plan)
        num_parts = len(engine.plan.groups.streamed) + 2  # each begins a page of its own
        assert planned <= engine.loaded.weight_stream.host_nbytes <= planned + num_parts * PAGE


def test_a_file_that_is_cut_off_ends_the_generation_with_an_error(
    fallback_model: Callable[[str], FallbackModel], tmp_path: object
) -> None:
    from graphcore.errors import CheckpointError

    model = save_fallback("stablelm", tmp_path, vocab_size=VOCAB)
    file = model.folder / "model.safetensors"
    with Engine.load(model.folder, dtype="fp32", device="cpu", streaming="on", overrides=SIZES) as engine:
        events = Paced(engine, model.ids[0].tolist(), 30)
        next(events)
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 3)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            list(events)


def test_a_forgotten_engine_ends_its_threads(fallback_model: Callable[[str], FallbackModel]) -> None:
    model, before = fallback_model("phi3"), fill_threads()
    engine = Engine.load(model.folder, dtype="fp32", device="cpu", streaming="on", overrides=SIZES)
    engine.generate(model.ids.tolist(), max_new_tokens=2)
    assert len(fill_threads()) > len(before)
    del engine
    assert collect_until(lambda: fill_threads() == before), fill_threads()
