"""Token by token over the cache gives the logits of one teacher-forced pass: every architecture, alone and in a batch.

The reference is transformers' pass over the whole sequence, which has no cache. Tolerance as in test_model_parity:
the promise is 1e-4.
"""

from collections.abc import Callable

import pytest
import torch
from tiny_models import ARCHITECTURES, AT_BOTH_WIDTHS, BUILDERS, VOCAB, TinyModel, tolerance_of

from graphcore import Engine

pytestmark = pytest.mark.thorough

LENGTHS = (50, 22, 3)  # tokens of the rows of the batch: more than a window's ring of 48 has room for, less, few
PROMPTS = (40, 5, 2)  # three chunks, less than a chunk, less than a window
Tiny = Callable[[str], TinyModel]
Load = Callable[[str, str], Engine]
EAGER = [(name, "eager") for name in BUILDERS]
OTHER_CACHES = tuple(name for name in BUILDERS if name.endswith(("_sliding", "_full", "_plain", "_dense", "_unified")))
COMPILED = {  # with those of test_model_parity.py, one model of each kind of block
    **dict.fromkeys(ARCHITECTURES, pytest.mark.slow),
    **dict.fromkeys(("gpt_oss", "gemma4"), pytest.mark.thorough),
    **dict.fromkeys(("gemma3", "qwen3_5"), ()),
}
IN_BATCHES = [pytest.param(name, "compiled", marks=COMPILED[name]) for name in ARCHITECTURES]
ALONE = [pytest.param(name, "compiled", marks=COMPILED[name]) for name in ("llama3", *AT_BOTH_WIDTHS)]


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


def rows_of(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.inference_mode()
def one_by_one(engine: Engine, row: list[int], prompt: int) -> torch.Tensor:
    """Return the logits after the prompt and after each later token: [T - prompt + 1, V]."""
    runner = engine.runner
    steps = [runner.extend([row[:prompt]], [0])]
    steps += [runner.extend([[token_id]], [at]) for at, token_id in enumerate(row[prompt:], start=prompt)]
    return torch.cat(steps)


@torch.inference_mode()
def together(engine: Engine, rows: list[list[int]], prompts: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the same for each of several rows that run at once; a row that has ended is fed its last token again."""
    runner = engine.runner
    begun = [row[:prompt] for row, prompt in zip(rows, prompts, strict=True)]
    steps = [[logits] for logits in runner.extend(begun, [0] * len(rows))]
    at = list(prompts)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        places = [min(place, len(row) - 1) for place, row in zip(at, rows, strict=True)]
        logits = runner.extend([[row[place]] for row, place in zip(rows, places, strict=True)], places)
        for index, row in enumerate(rows):
            if at[index] < len(row):
                steps[index].append(logits[index])
                at[index] += 1
    return [torch.stack(step) for step in steps]


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        # variants run in the batches below
        *(pytest.param(*case, marks=() if case[0] in ARCHITECTURES else pytest.mark.slow) for case in EAGER),
        *ALONE,
    ],
)
def test_one_sequence_decodes_to_its_teacher_forced_logits(
    name: str, graph: str, tiny_model: Tiny, load_tiny: Load
) -> None:
    tiny, engine = tiny_model(name), load_tiny(name, graph)
    ids = tiny.ids[0].tolist()
    for prompt, end in ((1, 20), (40, 50)):
        found = one_by_one(engine, ids[:end], prompt)
        assert worst(found, tiny.logits[0, prompt - 1 : end]) < tolerance_of(name), prompt


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        # a variant whose caches are those of its family runs slow: test_model_parity.py has its mathematics
        *(
            pytest.param(*case, marks=() if case[0] in (*ARCHITECTURES, *OTHER_CACHES) else pytest.mark.slow)
            for case in EAGER
        ),
        *IN_BATCHES,
    ],
)
def test_a_batch_of_different_lengths_decodes_to_its_teacher_forced_logits(
    name: str, graph: str, tiny_model: Tiny, load_tiny: Load
) -> None:
    tiny, engine = tiny_model(name), load_tiny(name, graph)
    rows = rows_of(seed=1)
    found = together(engine, rows, PROMPTS)
    for row, prompt, logits in zip(rows, PROMPTS, found, strict=True):
        expected = tiny.logits_of(torch.tensor([row]))[0, prompt - 1 :]
        assert worst(logits, expected) < tolerance_of(name)


@pytest.mark.parametrize(
    ("name", "graph"),
    [("llama3", "eager"), *((name, graph) for name in ("gemma3", "qwen3_5") for graph in ("eager", "compiled"))],
)
def test_two_rows_of_a_batch_of_three_run_beside_an_idle_one(
    name: str, graph: str, tiny_model: Tiny, load_tiny: Load
) -> None:
    tiny, engine = tiny_model(name), load_tiny(name, graph)
    rows = rows_of(seed=2)[:2]
    for row, prompt, logits in zip(rows, PROMPTS, together(engine, rows, PROMPTS[:2]), strict=False):
        assert worst(logits, tiny.logits_of(torch.tensor([row]))[0, prompt - 1 :]) < tolerance_of(name)


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma3", "qwen3_5", "lfm2"])
def test_a_cache_is_filled_in_pieces_of_any_size(name: str, tiny_model: Tiny, load_tiny: Load) -> None:
    # Chunks that begin inside, at and past the window; then a single token; then a chunk over several wraps of a ring.
    tiny, engine = tiny_model(name), load_tiny(name, "eager")
    ids = tiny.ids[1].tolist()
    ends = (3, 8, 9, 10, 21, 22, 50)
    for start, end in zip((0, *ends), ends, strict=False):
        with torch.inference_mode():
            logits = engine.runner.extend([ids[start:end]], [start])
        assert worst(logits[0], tiny.logits[1, end - 1]) < tolerance_of(name), end


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_what_a_cache_held_before_does_not_matter(name: str, tiny_model: Tiny, load_tiny: Load) -> None:
    tiny, engine = tiny_model(name), load_tiny(name, "eager")
    with torch.inference_mode():
        for tensor in (tensor for cache in engine.runner.builder.caches for tensor in cache.tensors):
            tensor.fill_(1e3)
    found = together(engine, rows_of(seed=3), PROMPTS)
    for row, prompt, logits in zip(rows_of(seed=3), PROMPTS, found, strict=True):
        assert worst(logits, tiny.logits_of(torch.tensor([row]))[0, prompt - 1 :]) < tolerance_of(name)
