"""Tokens that go on from states of sequences have the logits of the whole sequences."""

from collections.abc import Callable

import pytest
import torch
from support.tiny_models import TinyModel, tolerance_of

from graphcore import Engine
from graphcore.engine.sequence_state import SequenceState
from graphcore.errors import ConfigError

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]


def load(folder: object, *overrides: str) -> Engine:
    sizes = ["batch_size=2", "context_length=64", "prefill_chunk=16", *overrides]
    return Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gemma4", "lfm2"])  # lent caches, convolutions; others are in the engine matrix
def test_tokens_go_on_from_states_as_in_one_whole_sequence(name: str, tiny_model: Tiny) -> None:
    """Sequences of different lengths, more than there are rows; one goes on from its state in two ways."""
    tiny = tiny_model(name)
    first, second = (row.tolist() for row in tiny.ids)
    with load(tiny.folder) as engine:
        begun = engine.extend([first[:20], second[:33], first[:1]], [SequenceState() for _ in range(3)])
        assert [state.tokens for state in begun.states] == [20, 33, 1]
        sources = [begun.states[index] for index in (1, 0, 0, 2)]
        rows = [second[33:34], first[20:23], second[5:12], first[1:40]]
        found = engine.extend(rows, sources, num_logits=5)
        wholes = [second[:34], first[:23], first[:20] + second[5:12], first[:40]]
        for whole, row, logits in zip(wholes, rows, found.logits, strict=True):
            expected = tiny.logits_of(torch.tensor([whole]))[0, -min(5, len(row)) :]
            assert (logits - expected).abs().max() < tolerance_of(name)
        again = engine.extend(rows[:2], sources[:2], output_hidden_states=True)  # the states are as they were
        for layers, row, logits, before in zip(again.hidden_states, rows, again.logits, found.logits, strict=False):
            assert len(layers) == engine.config.num_hidden_layers + 1
            assert all(layer.shape == (len(row), engine.config.hidden_size) for layer in layers)
            assert (logits - before[-1:]).abs().max() < tolerance_of(name)


def test_what_cannot_be_extended_is_refused_in_one_line(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3").folder) as engine, load(tiny_model("llama3").folder) as other:
        with pytest.raises(ConfigError, match="extend: 2 sequences and 1 states; give one for each"):
            engine.extend([[1], [2]], [SequenceState()])
        with pytest.raises(ConfigError, match="the state belongs to another engine"):
            other.extend([[1]], engine.extend([[1]], [SequenceState()]).states)
        with pytest.raises(ConfigError, match="do not fit in context_length=64"):
            engine.extend([[1] * 10], engine.extend([[1] * 60], [SequenceState()]).states)
    fallback = load(tiny_model("llama3").folder, "model.fallback=transformers")
    with fallback, pytest.raises(ConfigError, match=r"leave out model\.fallback"):
        fallback.extend([[1]], [SequenceState()])


def test_a_wave_leaves_its_pages_to_the_next(tiny_model: Tiny) -> None:
    """Two sequences fill half of the cache each; the third, in the next wave, needs more than that."""
    tiny = tiny_model("llama3")
    rows = [tiny.ids[0, :30].tolist(), tiny.ids[1, :30].tolist(), tiny.ids[0, :45].tolist()]
    with load(tiny.folder, "batching.cache_tokens=64") as engine:
        found = engine.extend(rows, [SequenceState() for _ in rows])
        for row, logits in zip(rows, found.logits, strict=True):
            assert (logits - tiny.logits_of(torch.tensor([row]))[0, -1:]).abs().max() < tolerance_of("llama3")
