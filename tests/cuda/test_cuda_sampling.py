"""Sampling on the device: reproducible by its seed, within what was allowed, and distributed as the logits say."""

from collections import Counter

import pytest
import torch
from support.engine_fakes import draw_of
from support.tiny_models import TinyModel

from graphcore.graph.gpu.sampling import RowSettings, SamplingBuffers, choose_step
from graphcore.graph.state import StepState
from graphcore.kernels.ops.draw import Draw, choose_tokens

CUTS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 300, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.99},
)
SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_seed_gives_the_same_tokens_alone_again_and_in_another_engine(settings, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model("llama3")
    prompt = tiny.ids[0, :20].tolist()

    def tokens(engine, seed: int) -> tuple[int, ...]:
        return engine.generate([prompt], max_new_tokens=60, ignore_eos=True, seed=seed, **settings)[0].token_ids

    one, other = load_on(tiny.folder), load_on(tiny.folder)
    first = tokens(one, 7)
    assert tokens(one, 8) != first
    assert tokens(one, 7) == first
    assert tokens(other, 7) == first


def test_top_k_of_one_is_greedy(tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model("qwen3")
    prompt = tiny.ids[0, :20].tolist()
    engine = load_on(tiny.folder)
    greedy = engine.generate([prompt], max_new_tokens=60, ignore_eos=True)[0].token_ids
    sampled = engine.generate([prompt], max_new_tokens=60, ignore_eos=True, temperature=1.0, top_k=1, seed=3)[0]
    assert sampled.token_ids == greedy


def test_second_tokens_are_distributed_as_the_logits_say(tiny_model, load_on) -> None:
    """The second token is the first that the decode graph samples; a chi-square of 40 is far out for ten bins."""
    tiny: TinyModel = tiny_model("llama3")
    engine = load_on(tiny.folder)
    prompt = tiny.ids[0, :9].tolist()
    draws = [
        engine.generate([prompt], max_new_tokens=2, ignore_eos=True, temperature=0.7, top_k=10, seed=seed)[0].token_ids
        for seed in range(600)
    ]
    first, _ = Counter(one[0] for one in draws).most_common(1)[0]
    seen = Counter(one[1] for one in draws if one[0] == first)
    logits = engine.logits([[*prompt, first]])
    assert isinstance(logits, torch.Tensor)
    best, ids = (logits[0, -1] / 0.7).topk(10)
    total = sum(seen.values())
    assert set(seen) <= set(ids.tolist())
    expected = dict(zip(ids.tolist(), (best.softmax(-1) * total).tolist(), strict=True))
    assert sum((seen[token] - share) ** 2 / max(share, 1.0) for token, share in expected.items()) < 40


@pytest.mark.parametrize("vocab", [700, 49152, 262144])
def test_the_device_chooses_the_tokens_of_the_statement(vocab: int) -> None:
    """Rows of all kinds of settings from equal logits; the statement runs on the CPU."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(CUTS), vocab, generator=generator) * torch.linspace(0.1, 9.0, len(CUTS))[:, None]
    logits[-1] = (logits[-1] * 2).round() / 2  # ties
    for position in (1, 4095, (1 << 33) + 5):
        draws = [draw_of(seed=position - at, position=position, **cuts) for at, cuts in enumerate(CUTS)]
        expected = choose_tokens(logits, draws)
        assert device_tokens(logits, draws) == expected


def device_tokens(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Return the tokens that the GPU's kernels choose, each for its row."""
    rows, device = len(draws), torch.device("cuda")
    choosing = SamplingBuffers.allocate(rows, logits.shape[1], device)
    for row, one in enumerate(draws):
        choosing.put(row, RowSettings(params=one.params))
    state = StepState.empty(rows, 1, device)
    state.put_rows([[0]] * rows, [one.position - 1 for one in draws])
    state.logits = logits.cuda()
    choose_step(state, choosing, "top_k_top_p").replay()
    return state.chosen.tolist()
