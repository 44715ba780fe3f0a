"""Hidden states that run in several calls, from a state that goes on, are those of one call."""

from collections.abc import Callable

import pytest
import torch
from tiny_models import TinyModel

from graphcore import Engine, ForwardState
from graphcore.errors import ConfigError

Tiny = Callable[[str], TinyModel]
LENGTHS = (5, 1, 20, 9)  # in chunks of 16: shorter, one token, longer


def load(folder: object, *overrides: str) -> Engine:
    sizes = ["batch_size=2", "context_length=64", "prefill_chunk=16", *overrides]
    return Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("overrides", [(), ("streaming=on",), ("model.fallback=transformers",)], ids=" ".join)
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3_5"])
def test_parts_are_the_whole(name: str, overrides: tuple[str, ...], tiny_model: Tiny) -> None:
    with load(tiny_model(name).folder, *overrides) as engine:
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
