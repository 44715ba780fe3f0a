"""After warm-up nothing compiles: not for another prompt, length, chunk, wrapped ring, batch or sampling setting."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_models import ARCHITECTURES, VOCAB, TinyModel
from torch import Tensor

from graphcore import Engine
from graphcore.errors import GraphError
from graphcore.graph.artefacts import CachedPackages
from graphcore.graph.compile import measure_compile
from graphcore.nn.spec import MoESpec

pytestmark = pytest.mark.thorough

NEW_TOKENS = 30  # the longest prompt's fill gemma's rings of 48 positions and wrap
FEW_TOKENS = 4
TINY = Path(__file__).parents[1] / "golden" / "tiny"
NAMES = ("gemma3", pytest.param("gpt_oss", marks=pytest.mark.thorough))
# One model without rings, one with rings whose layers share caches, and a mixture with recurrent states; of the others
# no layer has a kind of its own.
COUNTED = ("llama3", "gemma4", "qwen3_5_moe")
Tiny = Callable[[str], TinyModel]
Load = Callable[[str, str], Engine]


@pytest.fixture
def warm(request: pytest.FixtureRequest, load_tiny: Load) -> tuple[str, Engine]:
    engine = load_tiny(request.param, "compiled")
    for num_sequences in (1, engine.runner.sizes.batch_size):
        engine.warm_up(num_sequences)
        engine.logits([[1] * 17] * num_sequences)  # teacher forcing has heads and a single token of its own
    return request.param, engine


def prompt(length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("warm", NAMES, indirect=True)
def test_nothing_compiles_after_warm_up(warm: tuple[str, Engine], load_tiny: Load) -> None:
    name, engine = warm
    eager = load_tiny(name, "eager")
    with measure_compile() as report:
        # One token, one chunk, chunks and a single token, chunks and a rest.
        for length, count in ((1, FEW_TOKENS), (2, FEW_TOKENS), (16, FEW_TOKENS), (33, NEW_TOKENS), (45, FEW_TOKENS)):
            found = engine.generate([prompt(length)], max_new_tokens=count)[0]
            assert len(found.token_ids) == count
            assert found.token_ids == eager.generate([prompt(length)], max_new_tokens=count)[0].token_ids
        batch = [prompt(length) for length in (40, 1, 17)]
        found = engine.generate(batch, max_new_tokens=FEW_TOKENS)
        assert [item.token_ids for item in found] == [
            item.token_ids for item in eager.generate(batch, max_new_tokens=FEW_TOKENS)
        ]
        engine.generate(batch[:2], max_new_tokens=9, temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.1)
        engine.generate(batch[:1], max_new_tokens=9, temperature=0.9, min_p=0.1, logprobs=True)
        engine.logits([prompt(50)])
        engine.logits([prompt(33), prompt(33)])
    assert (report.cache_hits, report.cache_misses) == (0, 0)


@pytest.mark.slow  # a Llama's two runs in test_command_line.py have two context lengths
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])  # a cache for every position, and rings
def test_another_context_length_compiles_nothing(name: str, tmp_path: Path) -> None:
    reports = []
    for context in (96, 200):
        sizes = [f"context_length={context}", "model.num_hidden_layers=1", f"cache_dir={tmp_path}"]
        with Engine.load(TINY / name, dtype="fp32", device="cpu", graph="compiled", overrides=sizes) as engine:
            reports.append(engine.warm_up())
    assert [(report.cache_hits, report.cache_misses) for report in reports] == [(0, 3), (3, 0)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that engines compile; they run as they are, as no C++ is compiled."""
    names: list[str] = []

    def make(self: CachedPackages, function: Callable[..., Tensor], name: str, *rest: object) -> Callable[..., Tensor]:
        names.append(name)
        return function

    monkeypatch.setattr(CachedPackages, "__call__", make)
    return names


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COUNTED else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_graphs_are_as_many_as_kinds_times_phases(name: str, tiny_model: Tiny, made: list[str]) -> None:
    with Engine.load(tiny_model(name).folder, dtype="fp32", device="cpu", graph="compiled") as engine:
        engine.warm_up()
        blocks = engine.runner.builder.decoder.spec.blocks
        kinds = dict.fromkeys(blocks)
        assert len(blocks) > len(kinds)
        halves = sum(2 if isinstance(kind.mlp, MoESpec) else 1 for kind in kinds)  # experts run between two graphs
        engine.generate([prompt(33)], max_new_tokens=3)
        assert len(made) == len({*made}) == 2 * halves + 1  # prefill and decode of each, and the head
        assert engine.stats["compiled_graphs"] == 2 * len(kinds) + 1  # the two halves count as one


def test_an_integer_that_differs_between_layers_is_caught(tiny_model: Tiny) -> None:
    with Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", graph="compiled") as engine:
        for number, block in enumerate(engine.runner.builder.decoder.layers):
            block.number = number
        with pytest.raises(GraphError, match=r"modules with one compiled function differ in \.number=0, \.number=1"):
            engine.generate([prompt(33)], max_new_tokens=2)
