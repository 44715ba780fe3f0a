"""Losses of a sequence are those of transformers' logits in float64, on both paths and however they are sliced."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from support.comparisons import peak_nbytes
from support.tiny_models import VOCAB, TinyModel, llama

from graphcore import Engine
from graphcore.engine.batching.prompt_outputs import PromptOutputs
from graphcore.engine.forward_pass import RowChunk
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.scoring import PATHS, token_losses, warm_up
from graphcore.errors import ConfigError
from graphcore.planning.workspace import SLICE_LOGITS

IDS = torch.randint(0, VOCAB, (50,), generator=torch.Generator().manual_seed(11)).tolist()
TOLERANCE = 3e-5  # nats, at float32


def expected_losses(tiny: TinyModel, ids: list[int]) -> torch.Tensor:
    """Return minus the log probability of each token but the first: [T - 1] float64."""
    logits = tiny.logits_of(torch.tensor([ids]))[0].double()
    chances = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    return -torch.stack([chances[at, token].log() for at, token in enumerate(ids[1:])])


@pytest.mark.parametrize("family", ["llama3", "gemma3", "qwen3_5"])
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


@pytest.mark.parametrize("tokens", [2, 3, 5, 64])
def test_the_head_runs_on_slices_of_equal_lengths_no_larger_than_allowed(
    tiny_model: Callable[[str], TinyModel],
    load_tiny: Callable[[str, str], Engine],
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
) -> None:
    engine = load_tiny("llama3", "eager")
    sizes: list[int] = []
    project = engine.runner.project

    def seen(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes.extend(hidden.shape[1] for hidden in rows)
        return project(rows)

    monkeypatch.setattr(engine.runner, "project", seen)
    monkeypatch.setattr(engine.runner, "scored_tokens", tokens)
    found = token_losses(engine.runner, IDS, 4, "prefill")  # chunks of 13, 16, 16 and 1
    assert max(sizes) == min(tokens, 16)
    assert min(sizes[:-1]) >= min(tokens, 13) // 2
    assert sum(sizes) == 46  # and only where a token is scored
    assert (found - expected_losses(tiny_model("llama3"), IDS)[3:]).abs().max() < TOLERANCE


LARGE_VOCAB, CHUNK = 20_000, 256  # of which a chunk's logits take 20 MB, and the plan of all else 10


@pytest.mark.thorough
@pytest.mark.parametrize("fallback", ["null", "transformers"])
def test_what_a_prompt_is_asked_for_takes_no_more_than_the_plan_has_room_for(tmp_path: Path, fallback: str) -> None:
    """Log probabilities of a prompt, perplexity and embeddings with the smallest budget, by torch's own count."""
    model = llama(vocab_size=LARGE_VOCAB)
    model.save_pretrained(tmp_path)
    sizes = [f"context_length={2 * CHUNK}", f"prefill_chunk={CHUNK}", f"model.fallback={fallback}"]

    def load(*overrides: str) -> Engine:
        return Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=[*sizes, *overrides])

    with load() as engine:
        assert engine.runner.scored_tokens == SLICE_LOGITS // LARGE_VOCAB, "there is memory enough"
        least = engine.loaded.plan.peak_nbytes
    with load("streaming=auto", f"streaming.memory_budget={least}") as engine:
        plan = engine.loaded.plan
        room = plan.other.workspace_nbytes + plan.spare_nbytes
        ids = torch.randint(0, LARGE_VOCAB, (CHUNK + 1,), generator=torch.Generator().manual_seed(2)).tolist()
        assert peak_nbytes(lambda: token_losses(engine.runner, ids, 1, "prefill"), tmp_path) <= room
        if fallback == "transformers":
            return
        runner = cast("ProgramRunner", engine.runner)
        asked = engine._parts.requests.one("submit", ids, prompt_logprobs=2)
        asked += engine._parts.requests.embeddings(ids, "mean")
        hidden = torch.randn(1, CHUNK, 64, generator=torch.Generator().manual_seed(3))
        expected = runner.project([hidden])[0][0].double().log_softmax(dim=-1)
        for request in asked:
            read = partial(PromptOutputs(runner).read, request, RowChunk(0, ids[:CHUNK], 0, is_last=True), hidden)
            assert peak_nbytes(read, tmp_path) <= room
        found = [one.logprob for one in asked[0].prompt_logprobs]
        assert found[1:] == pytest.approx(
            [float(expected[at, token]) for at, token in enumerate(ids[1:])], abs=TOLERANCE
        )


@pytest.mark.parametrize("path", PATHS)
def test_a_sequence_may_be_one_longer_than_the_context_and_no_more(path: str, tiny_model: object) -> None:
    folder = tiny_model("gpt2").folder
    with Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=["context_length=20"]) as engine:
        assert len(token_losses(engine.runner, IDS[:21], 1, path)) == 20
        with pytest.raises(ConfigError, match="21 tokens do not fit in context_length=20"):
            token_losses(engine.runner, IDS[:22], 1, path)
