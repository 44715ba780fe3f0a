"""Streamed weights on a GPU give the resident model's bits."""

from collections.abc import Sequence

import pytest
import torch
from support.streaming import IDS, PROMPTS, differing, results
from support.tiny_models import BUILDERS

from graphcore import Engine

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


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_packed_weights_stream_to_the_bit(quant: str, tiny_model, load_on) -> None:
    folder = tiny_model("llama3").folder
    prompt = PROMPTS[0]
    engines = [load_on(folder, dtype="bf16", quant=quant, streaming=way) for way in ("off", "on")]
    logits = [engine.logits(IDS) for engine in engines]
    assert torch.equal(logits[0], logits[1])
    tokens = [engine.generate([prompt], max_new_tokens=30, ignore_eos=True)[0].token_ids for engine in engines]
    assert tokens[0] == tokens[1]
