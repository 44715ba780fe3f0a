"""How much of a cache serves a new prompt. That the answers stay the same: tests/integration/test_prefix_reuse.py."""

from collections.abc import Sequence

import pytest
import torch

from graphcore.engine.prefix import reusable_prefix
from graphcore.nn.kv_cache import LayerCache

CACHED = [1, 2, 3, 4, 5, 6]


def caches(*slots: int) -> list[LayerCache]:
    return [LayerCache(torch.empty(1, 1, size, 2), torch.empty(1, 1, size, 2)) for size in slots]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([*CACHED, 7], 6),
        ([*CACHED, 7, 8], 6),
        (CACHED, 5),  # the last token always runs, for its logits
        ([1, 2, 3], 2),
        ([1, 2, 9, 9], 2),
        ([9], 0),
        ([1], 0),
    ],
)
def test_full_attention_goes_back_to_where_the_prompts_part(prompt: Sequence[int], expected: int) -> None:
    assert reusable_prefix(CACHED, prompt, caches(64, 64)) == expected


@pytest.mark.parametrize(("prompt", "expected"), [([*CACHED, 7], 6), (CACHED, 0), ([1, 2, 3], 0), ([1, 2, 9, 9], 0)])
def test_a_ring_that_has_wrapped_can_only_go_on(prompt: Sequence[int], expected: int) -> None:
    assert reusable_prefix(CACHED, prompt, caches(64, 5)) == expected


def test_a_ring_that_is_just_full_has_lost_nothing() -> None:
    assert reusable_prefix(CACHED, [1, 2, 9, 9], caches(64, 6)) == 2


def test_nothing_cached_serves_nobody() -> None:
    assert reusable_prefix([], [1, 2], caches(64)) == 0
