"""Hidden states that run in several calls, from a state that goes on, are those of one call.

Between calls a state's pages stay in the caches, or are swapped out when somebody needs them; no bit depends on it.
"""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_models import TinyModel

from graphcore import Engine, ForwardState
from graphcore.errors import ConfigError
from graphcore.kvcache.buffers import KVCache
from graphcore.kvcache.forward_sequences import ForwardSequencePool
from graphcore.kvcache.page_allocator import PageAllocator

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
LENGTHS = (5, 1, 20, 9)  # in chunks of 16: shorter, one token, longer


def load(folder: object, *overrides: str) -> Engine:
    sizes = ["batch_size=2", "context_length=64", "prefill_chunk=16", *overrides]
    return Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3_5", "lfm2"])
def test_parts_are_the_whole_in_transformers_caches_too(name: str, tiny_model: Tiny) -> None:
    with load(tiny_model(name).folder, "model.fallback=transformers") as engine:
        rows = engine.runner.sizes.batch_size  # 1 for a transformers model that cannot leave padding out
        hidden = torch.randn(rows, sum(LENGTHS), engine.config.hidden_size, generator=torch.Generator().manual_seed(3))
        whole = engine.forward(hidden)
        state, parts = ForwardState(), []
        for part in hidden.split(LENGTHS, dim=1):
            parts.append(engine.forward(part, state))
            engine.generate([[7, 8, 9]], max_new_tokens=3)  # what runs between does not touch it
        assert (state.rows, state.tokens) == (rows, sum(LENGTHS))
        assert (torch.cat(parts, dim=1) - whole).abs().max() < 2e-5 * whole.abs().max()


def test_a_state_that_does_not_fit_is_refused_by_name(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3").folder) as engine, load(tiny_model("llama3").folder) as other:
        hidden = torch.zeros(2, 3, engine.config.hidden_size)
        state = ForwardState()
        engine.forward(hidden, state)
        with pytest.raises(ConfigError, match="the state belongs to another engine"):
            other.forward(hidden, state)
        with pytest.raises(ConfigError, match="hidden_states has 1 rows, and the state has room for 2"):
            engine.forward(hidden[:1], state)
        with pytest.raises(ConfigError, match="hidden_states has 3 rows, and the state has room for 2"):
            engine.forward(hidden[[0, 0, 0]], ForwardState())
        with pytest.raises(ConfigError, match="do not fit in context_length=64"):
            engine.forward(hidden[:, [0] * 62], state)
        assert torch.equal(engine.forward(hidden, ForwardState()), engine.forward(hidden))


KINDS = ["llama3", "gemma3", "qwen3_5", "lfm2"]  # pages, rings, recurrent states
STEPS = (20, 1, 1, 16, 1, 5)


def hidden_of(seed: int, rows: int = 1, length: int = sum(STEPS)) -> torch.Tensor:
    return torch.randn(rows, length, 64, generator=torch.Generator().manual_seed(seed))


def holding_of(engine: Engine) -> ForwardSequencePool:
    return engine.runner._holding  # type: ignore[attr-defined]


def pages_of(engine: Engine) -> PageAllocator:
    return engine.runner.pages  # type: ignore[attr-defined]


def alone(engine: Engine, seed: int, rows: int = 1) -> list[torch.Tensor]:
    """Return what each step gives where nothing runs between."""
    state = ForwardState()
    return [engine.forward(part, state) for part in hidden_of(seed, rows).split(STEPS, dim=1)]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of pages of each copy out of or into a cache."""
    found: list[int] = []
    out, into = KVCache.copy_out, KVCache.copy_in

    def copy_out(self: KVCache, pages: torch.Tensor) -> Any:
        found.append(len(pages))
        return out(self, pages)

    def copy_in(self: KVCache, pages: torch.Tensor, kept: Any) -> None:
        found.append(len(pages))
        into(self, pages, kept)

    monkeypatch.setattr(KVCache, "copy_out", copy_out)
    monkeypatch.setattr(KVCache, "copy_in", copy_in)
    return found


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_pages_stay_where_they_are(name: str, tiny_model: Tiny, copied: list[int]) -> None:
    with load(tiny_model(name).folder) as engine:
        state = ForwardState()
        for part in hidden_of(1, rows=1).split(STEPS, dim=1):
            engine.forward(part, state)
        assert copied == []


@pytest.mark.parametrize(
    ("name", "overrides"), [*((name, ()) for name in KINDS), ("qwen3_5", ("streaming=on",))], ids=str
)
def test_many_states_have_the_bits_of_one(name: str, overrides: tuple[str, ...], tiny_model: Tiny) -> None:
    """Three states of two sequences where there are pages for one of them, requests between them, from two threads."""
    with load(tiny_model(name).folder, *overrides) as engine:
        expected = {seed: alone(engine, seed, rows=2) for seed in range(3)}
        request = engine.generate([[7, 8, 9] * 10], max_new_tokens=8, ignore_eos=True)[0].token_ids
        states = {seed: ForwardState() for seed in expected}
        parts = {seed: hidden_of(seed, rows=2).split(STEPS, dim=1) for seed in expected}
        handles = []
        for step in range(len(STEPS)):
            handles.append(engine.submit([7, 8, 9] * 10, max_new_tokens=8, ignore_eos=True))
            for seed, state in states.items():
                assert torch.equal(engine.forward(parts[seed][step], state), expected[seed][step])
        assert {handle.result().token_ids for handle in handles} == {request}
        assert all((state.tokens, state.rows) == (sum(STEPS), 2) for state in states.values())


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_dropped_gives_its_pages_back(name: str, tiny_model: Tiny) -> None:
    with load(tiny_model(name).folder) as engine:
        tables = pages_of(engine).tables
        states = [ForwardState() for _ in range(2)]
        for state in states:
            engine.forward(hidden_of(1), state)
        assert any(table.num_free < table.num_pages for table in tables)
        del state
        thread = threading.Thread(target=states.clear)  # a collector may run in any thread
        thread.start()
        thread.join()
        gc.collect()
        holding_of(engine)._give_back_dropped()
        engine._queue.run_alone("test", lambda: None)
        assert [table.num_free for table in tables] == [table.num_pages for table in tables]
        assert not any(table._refs for table in tables)
        assert not holding_of(engine)._held


@pytest.mark.parametrize("name", KINDS)
def test_a_call_that_fails_leaves_the_state_as_it_was(
    name: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_model(name).folder) as engine:
        expected, state = alone(engine, 2), ForwardState()
        runner: Any = engine.runner
        blocks = runner.blocks

        def fail_at_the_end(hidden: torch.Tensor, start: int) -> torch.Tensor:
            blocks(hidden, start)
            raise ConfigError("as a disk does")

        for part, right in zip(hidden_of(2).split(STEPS, dim=1), expected, strict=True):
            monkeypatch.setattr(runner, "blocks", fail_at_the_end)
            with pytest.raises(ConfigError, match="as a disk does"):
                engine.forward(-part, state)
            monkeypatch.setattr(runner, "blocks", blocks)
            assert torch.equal(engine.forward(part, state), right)
        with pytest.raises(ConfigError, match="do not fit in context_length=64"):
            engine.forward(hidden_of(3), state)


def test_a_full_cache_swaps_states_out_for_requests(tiny_model: Tiny, copied: list[int]) -> None:
    with load(tiny_model("llama3").folder) as engine:
        expected, state = alone(engine, 4, rows=2), ForwardState()
        for part, right in zip(hidden_of(4, rows=2).split(STEPS, dim=1), expected, strict=True):
            engine.generate([[1] * 60, [2] * 60], max_new_tokens=4)  # both rows and all pages
            assert torch.equal(engine.forward(part, state), right)
        assert copied
