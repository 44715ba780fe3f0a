"""A cache in pages of any size, in any order, has the bits of one page for the whole context: every architecture.

Tiny contexts fit in one page, whose positions lie one after another: the contiguous cache that pages are compared with.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine_fakes import give_in_random_order, seen_by_next
from support.streaming import runs_as
from support.tiny_models import ARCHITECTURES, TinyModel
from test_decode_equals_forward import LENGTHS, PROMPTS, one_by_one, rows_of, together
from torch import Tensor

from graphcore import Engine
from graphcore.engine.loading import decoder_loader
from graphcore.engine.program_runner import ProgramRunner
from graphcore.kvcache.buffers import KVCache, LayerCache, allocate_cache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.spec import ModelSpec

pytestmark = pytest.mark.thorough

CONTEXT, CHUNK, BATCH = 64, 16, 3
PAGE = 4
SETTINGS = {  # graph=auto: native decode steps, and prompts eager
    "eager": ("eager", "fp32"),
    "eager, bf16": ("eager", "bf16"),
    "native": ("auto", "fp32"),
    "native, bf16, streamed": ("auto", "bf16", "streaming=on"),
}
QUICK = ("gemma4",)  # rings and shared layers: every way by default
# Rings, states, latent rows, sinks: one family of each kind of cache is streamed in CI, and one runs native by default.
NATIVE = ("llama3", "mistral", "gpt2", "gemma3", "gpt_oss", "qwen3_next", "deepseek_v2", "lfm2", "exaone4")
STREAMED = ("llama3", "mistral", "gpt_oss", "qwen3_next", "qwen3_5_moe", "lfm2", "deepseek_v3", "smollm3")


def marks_of(name: str, how: str) -> Sequence[pytest.MarkDecorator]:
    """Return the marks of a family's case."""
    if name in QUICK:
        return ()
    if how == "native":
        return () if name in NATIVE else (pytest.mark.slow,)
    is_streamed = how == "native, bf16, streamed" and name in STREAMED
    return (pytest.mark.thorough if is_streamed else pytest.mark.slow,)


CASES = [pytest.param(name, how, marks=marks_of(name, how)) for name in ARCHITECTURES for how in SETTINGS]
Tiny = Callable[[str], TinyModel]


@contextmanager
def engine_with_pages(
    model: TinyModel, page: int, monkeypatch: pytest.MonkeyPatch, graph: str, dtype: str, *overrides: str
) -> Iterator[Engine]:
    """Yield an engine whose sequences have pages of that size, in random order unless there is one for each."""

    def allocate(spec: ModelSpec, sizes: CacheSizes, device: torch.device, *offloaded: Any) -> tuple[LayerCache, ...]:
        return allocate_cache(spec, replace(sizes, page=page), device, *offloaded)

    sizes = (f"context_length={CONTEXT}", f"prefill_chunk={CHUNK}", f"batch_size={BATCH}", *overrides)
    with monkeypatch.context() as patch:
        patch.setattr(decoder_loader, "allocate_cache", allocate)
        engine = Engine.load(model.folder, dtype=dtype, device="cpu", graph=graph, overrides=sizes)
    with engine:
        assert runs_as(engine, graph)
        give_in_random_order(engine.runner.pages)  # type: ignore[attr-defined]  # a runner of programs
        yield engine


def held(engine: Engine) -> list[Tensor]:
    """Return what the caches hold of each sequence."""
    assert isinstance(engine.runner, ProgramRunner)
    return [one for row, tokens in enumerate(LENGTHS) for one in seen_by_next(engine.runner, row, tokens)]


def answers(engine: Engine) -> list[Tensor]:
    """Return logits of one sequence and of a batch, and what the caches then hold."""
    rows = rows_of(seed=1)
    return [one_by_one(engine, rows[1], 17), *together(engine, rows, PROMPTS), *held(engine)]


def assert_bits_agree(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, page: int, graph: str, dtype: str, *overrides: str
) -> None:
    with engine_with_pages(model, CONTEXT, monkeypatch, graph, dtype, *overrides) as engine:
        expected = answers(engine)
    with engine_with_pages(model, page, monkeypatch, graph, dtype, *overrides) as engine:
        caches = [one for one in engine.runner.builder.caches if isinstance(one, KVCache)]  # type: ignore[attr-defined]
        assert all(one.k.shape[2] == page for one in caches)
        found = answers(engine)
        assert page > 8 or any(one.table[0].diff().ne(1).any() for one in caches)
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"answer {index}"


@pytest.mark.parametrize(("name", "how"), CASES)
def test_pages_have_the_bits_of_a_contiguous_cache(
    name: str, how: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_bits_agree(tiny_model(name), monkeypatch, PAGE, *SETTINGS[how])


@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize(("name", "graph"), [("mistral", "auto"), ("gemma4", "eager")])
def test_pages_may_have_any_size(
    name: str, graph: str, page: int, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_bits_agree(tiny_model(name), monkeypatch, page, graph, "fp32")


@pytest.mark.slow  # compiled blocks attend pages of codes in test_coded_caches.py
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3_5", "lfm2"])
def test_compiled_blocks_have_the_bits_too(name: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_bits_agree(tiny_model(name), monkeypatch, PAGE, "compiled", "fp32", "streaming=on")


@pytest.mark.parametrize("name", ["mistral", "gemma4", "qwen3_next"])
def test_sequences_are_put_aside_page_by_page(name: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows_of(seed=2)[0]
    with engine_with_pages(tiny_model(name), PAGE, monkeypatch, "eager", "fp32") as engine, torch.inference_mode():
        runner = engine.runner
        runner.extend([row[:40]], [0])
        expected = runner.extend([row[40:]], [40])
        runner.extend([row[:40]], [0])
        kept = runner.pages.copy_out(0, 40)
        runner.extend([row[::-1]], [0])
        runner.pages.free(0)
        assert runner.pages.copy_in(0, kept)
        assert torch.equal(runner.extend([row[40:]], [40]), expected)
