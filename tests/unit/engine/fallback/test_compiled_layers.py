"""Room in caches, and what keeps a layer from being compiled; compiled layers are in test_fallback_compiled.py."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from graphcore.engine.fallback.compiled_layers import CompiledLayers, with_room

ROWS, HEADS, WIDTH, CONTEXT = 2, 3, 4, 100


def states(tokens: int) -> Tensor:
    return torch.randn(ROWS, HEADS, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))


def test_a_place_is_added_in_the_same_memory_until_its_room_is_used_up() -> None:
    expected, kept = states(5), states(5)
    begins = []
    for step in range(CONTEXT - 5):
        kept = with_room(kept, CONTEXT)
        kept[:, :, -1:] = states(1) + step
        expected = torch.cat([expected, states(1) + step], dim=2)
        assert torch.equal(kept, expected)
        assert kept.stride() == (HEADS * WIDTH, WIDTH, ROWS * HEADS * WIDTH, 1)
        begins.append(kept.data_ptr())
    assert len(set(begins)) == 2  # 64 tokens, then all that the context has
    assert kept.untyped_storage().nbytes() == CONTEXT * ROWS * HEADS * WIDTH * 4


def test_a_window_moves_to_new_memory_when_it_reaches_the_end() -> None:
    window, expected, kept = 7, states(7), states(7)
    begins = set()
    for step in range(3 * CONTEXT):
        kept = with_room(kept, CONTEXT)
        kept[:, :, -1:] = states(1) + step
        expected = torch.cat([expected, states(1) + step], dim=2)[:, :, -window:]
        kept = kept[:, :, -window:]
        assert torch.equal(kept, expected)
        begins.add(kept.untyped_storage().data_ptr())
        assert kept.untyped_storage().nbytes() == 64 * ROWS * HEADS * WIDTH * 4


def test_keys_in_another_order_of_memory_are_copied() -> None:
    for order in (states(6), states(6).transpose(1, 2).contiguous().transpose(1, 2), states(9)[:, :, 1:7]):
        assert torch.equal(with_room(order, CONTEXT)[:, :, :6], order)
        assert with_room(order, CONTEXT).untyped_storage().data_ptr() != order.untyped_storage().data_ptr()


class Branching(nn.Module):
    """A layer that looks at its input, which no graph can hold."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden_states: Tensor, cache: DynamicCache | None = None) -> Tensor:
        if hidden_states.sum().item() > 0:
            return hidden_states + 1
        return hidden_states - 1


@pytest.fixture
def lines() -> list[str]:
    return []


def compiled(layers: list[nn.Module], lines: list[str], folder: Path) -> CompiledLayers:
    return CompiledLayers(layers, CONTEXT, folder, lambda name: None, lines.append)


def filled_cache(layers: int) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(states(5), states(5), layer)
    return cache


def test_a_layer_that_does_not_trace_runs_eager_and_its_class_says_why_once(lines: list[str], tmp_path: Path) -> None:
    layers: list[nn.Module] = [Branching(0), Branching(1)]
    held, cache = compiled(layers, lines, tmp_path), filled_cache(2)
    hidden = torch.ones(ROWS, 1, 8)
    for _ in range(2):
        assert [layer(hidden, cache=cache).sum().item() for layer in layers] == [32.0, 32.0]
    (line,) = lines
    assert line.startswith("Branching runs eager, not compiled: ")
    assert "data-dependent" in line
    assert "\n" not in line
    assert not held.is_any_compiled
    assert held.num_compiled == 0
    assert torch.equal(cache.layers[0].keys, states(5))  # type: ignore[union-attr]  # it was not grown


@pytest.mark.parametrize(
    ("number", "arguments", "says"),
    [
        (0, {}, "it gets no cache of a kind that is known"),
        (3, {"cache": filled_cache(1)}, "its cache has another number than the layer"),
    ],
)
def test_a_layer_without_a_cache_of_its_own_runs_eager(
    number: int, arguments: dict[str, DynamicCache], says: str, lines: list[str], tmp_path: Path
) -> None:
    layer = Branching(number)
    compiled([layer], lines, tmp_path)
    for _ in range(2):
        assert layer(torch.ones(ROWS, 1, 8), **arguments).sum().item() == 32.0
    assert lines == [f"Branching runs eager, not compiled: {says}"]


def test_a_layer_beyond_its_cache_runs_eager(lines: list[str], tmp_path: Path) -> None:
    layers: list[nn.Module] = [Branching(0), Branching(1)]
    compiled(layers, lines, tmp_path)
    assert layers[1](torch.ones(ROWS, 1, 8), cache=filled_cache(1)).sum().item() == 32.0
    assert lines == ["Branching runs eager, not compiled: its cache (DynamicCache) has 1 layers"]


def test_prompts_run_eager_without_a_word(lines: list[str], tmp_path: Path) -> None:
    layer = Branching(0)
    compiled([layer], lines, tmp_path)
    assert layer(torch.ones(ROWS, 2, 8), cache=filled_cache(1)).sum().item() == 64.0
    assert not lines
