"""Sampling on the device: reproducible by its seed, within what was allowed, and distributed as the logits say."""

from collections import Counter

import pytest
import torch
from tiny_models import TinyModel

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
