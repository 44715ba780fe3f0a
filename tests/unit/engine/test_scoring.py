"""Losses of a sequence are those of transformers' logits in float64, on both paths and however they are sliced."""

from collections.abc import Callable

import pytest
import torch
from tiny_models import ARCHITECTURES, VOCAB, TinyModel

from graphcore import Engine
from graphcore.engine import scoring
from graphcore.engine.scoring import PATHS, token_losses, warm_up
from graphcore.errors import ConfigError

IDS = torch.randint(0, VOCAB, (50,), generator=torch.Generator().manual_seed(11)).tolist()
TOLERANCE = 3e-5  # nats, at float32


def expected_losses(tiny: TinyModel, ids: list[int]) -> torch.Tensor:
    """Return minus the log probability of each token but the first: [T - 1] float64."""
    logits = tiny.logits_of(torch.tensor([ids]))[0].double()
    chances = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    return -torch.stack([chances[at, token].log() for at, token in enumerate(ids[1:])])


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_losses_are_those_of_transformers(
    tiny_model: Callable[[str], TinyModel], load_tiny: Callable[[str, str], Engine], family: str
) -> None:
    """On both paths: a prompt's chunks, and one token at a time."""
    engine, expected = load_tiny(family, "eager"), expected_losses(tiny_model(family), IDS[:20])
    for path in PATHS:
        found = token_losses(engine.runner, IDS[:20], 1, path)  # chunks of 16 and of 3
        assert found.dtype is torch.float64
        assert found.shape == (19,)
        assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["llama3", "qwen3_5"])  # with pages alone, and with states
def test_losses_begin_at_any_token(
    tiny_model: Callable[[str], TinyModel], load_tiny: Callable[[str, str], Engine], family: str, path: str
) -> None:
    engine, expected = load_tiny(family, "eager"), expected_losses(tiny_model(family), IDS)
    for first in (1, 2, 17, 33, 49) if path == "prefill" else (1, 33):  # chunks of 16 predict tokens 1 to 16, 17 to 32
        found = token_losses(engine.runner, IDS, first, path)
        assert found.shape == (50 - first,)
        assert (found - expected[first - 1 :]).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_logits_by_token_are_those_of_transformers(
    tiny_model: Callable[[str], TinyModel], load_tiny: Callable[[str, str], Engine], family: str
) -> None:
    engine, rows = load_tiny(family, "eager"), torch.tensor([IDS[:30], IDS[20:], IDS[10:40]])
    passes = engine.runner.num_passes([30])
    fed: list[int] = []
    feed = engine.runner.extend
    engine.runner.extend = lambda ids, starts: fed.append(len(ids[0])) or feed(ids, starts)
    found = engine.logits(rows, by_token=True)
    del engine.runner.extend
    assert (found - tiny_model(family).logits_of(rows)).abs().max() < TOLERANCE
    assert set(fed) == {1}
    assert passes == 2  # chunks of 16


@pytest.mark.thorough
@pytest.mark.parametrize("path", PATHS)
def test_compiled_programs_give_the_same(
    tiny_model: Callable[[str], TinyModel], load_tiny: Callable[[str, str], Engine], path: str
) -> None:
    engine = load_tiny("qwen3", "compiled")
    warm_up(engine.runner, path)
    num_graphs = len(engine.runner.builder.functions.compiled)
    found = token_losses(engine.runner, IDS[:35], 3, path)  # chunks of 16, 16 and 2
    assert (found - expected_losses(tiny_model("qwen3"), IDS[:35])[2:]).abs().max() < TOLERANCE
    assert len(engine.runner.builder.functions.compiled) == num_graphs  # nothing was left to compile


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("by", ["size", "free memory"])
def test_the_head_runs_on_slices_no_larger_than_allowed_and_than_half_of_what_is_free(
    tiny_model: Callable[[str], TinyModel],
    load_tiny: Callable[[str, str], Engine],
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    by: str,
) -> None:
    engine = load_tiny("llama3", "eager")
    sizes: list[int] = []
    project = engine.runner.project

    def seen(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes.extend(hidden.shape[1] for hidden in rows)
        return project(rows)

    monkeypatch.setattr(engine.runner, "project", seen)
    if by == "size":
        monkeypatch.setattr(scoring, "SLICE_LOGITS", tokens * VOCAB + 5)
    else:  # each logit is there three times, in float32
        monkeypatch.setattr(scoring, "free_device_nbytes", lambda device: 2 * 12 * (tokens * VOCAB + 5))
    found = token_losses(engine.runner, IDS, 4, "prefill")
    assert max(sizes) == max(tokens, 2)  # the compiled head of a chunk takes two at least
    assert sum(sizes) == 46  # and only where a token is scored
    assert (found - expected_losses(tiny_model("llama3"), IDS)[3:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
def test_a_sequence_may_be_one_longer_than_the_context_and_no_more(path: str, tiny_model: object) -> None:
    folder = tiny_model("gpt2").folder
    with Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=["context_length=20"]) as engine:
        assert len(token_losses(engine.runner, IDS[:21], 1, path)) == 20
        with pytest.raises(ConfigError, match="21 tokens do not fit in context_length=20"):
            token_losses(engine.runner, IDS[:22], 1, path)
