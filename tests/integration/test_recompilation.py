"""After warm-up nothing compiles: not for another prompt, length, chunk, wrapped ring, batch or sampling setting.

`fail_on_recompile` turns any compilation into an error; torch's own counters say that none was skipped either.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.tiny_models import ARCHITECTURES, VOCAB, TinyModel
from torch import Tensor

from graphcore import Engine
from graphcore.nn.block import Block
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
def warm(request: pytest.FixtureRequest, load_tiny: Load) -> Iterator[tuple[str, Engine]]:
    engine = load_tiny(request.param, "compiled")
    for num_sequences in (1, engine.runner.sizes.batch_size):
        engine.warm_up(num_sequences)
        engine.logits([[1] * 17] * num_sequences)  # teacher forcing has heads and a single token of its own
    with torch.compiler.set_stance("fail_on_recompile"):
        yield request.param, engine


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def prompt(length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("warm", NAMES, indirect=True)
def test_nothing_compiles_after_warm_up(warm: tuple[str, Engine], load_tiny: Load) -> None:
    name, engine = warm
    eager = load_tiny(name, "eager")
    before = compiled_graphs()
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
    assert compiled_graphs() == before


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
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace, guard and count as always, but run what was traced as it is: no C++ is compiled."""
    whole = torch.compile

    def traced(function: Callable[..., Tensor], fullgraph: bool, dynamic: bool, options: object) -> object:
        return whole(function, backend="eager", fullgraph=fullgraph, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", traced)


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COUNTED else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_graphs_are_as_many_as_kinds_times_phases(name: str, tiny_model: Tiny) -> None:
    with Engine.load(tiny_model(name).folder, dtype="fp32", device="cpu", graph="compiled") as engine:
        before = compiled_graphs()
        engine.warm_up()
        blocks = engine.runner.builder.decoder.spec.blocks
        kinds = dict.fromkeys(blocks)
        assert len(blocks) > len(kinds)
        halves = sum(2 if isinstance(kind.mlp, MoESpec) else 1 for kind in kinds)  # experts run between two graphs
        with torch.compiler.set_stance("fail_on_recompile"):
            engine.generate([prompt(33)], max_new_tokens=3)
        assert compiled_graphs() - before == 2 * halves + 1  # prefill and decode of each, and the head
        assert engine.stats["compiled_graphs"] == 2 * len(kinds) + 1  # the two halves count as one


@pytest.mark.usefixtures("_traced_only")
def test_an_integer_that_differs_between_layers_is_caught(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Block.forward

    def numbered(self: Block, *arguments: Tensor) -> Tensor:
        return whole(self, *arguments) + 0 * self.number

    monkeypatch.setattr(Block, "forward", numbered)
    with Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", graph="compiled") as engine:
        for number, block in enumerate(engine.runner.builder.decoder.layers):
            block.number = number
        engine.warm_up()
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
            engine.generate([prompt(33)], max_new_tokens=2)


def test_the_check_itself_catches_a_compilation(tiny_model: Tiny) -> None:
    with (
        Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", graph="compiled") as cold,
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="recompile"),
    ):
        cold.generate([prompt(5)], max_new_tokens=2)
