"""Token by token over the cache gives the logits of one teacher-forced pass: every architecture, alone and in a batch.

The reference is transformers' pass over the whole sequence, which has no cache. Tolerance as in test_model_parity:
the promise is 1e-4.
"""

from collections.abc import Callable

import pytest
import torch
from support.tiny_models import ARCHITECTURES, AT_BOTH_WIDTHS, BUILDERS, VOCAB, TinyModel, tolerance_of

from graphcore import Engine

pytestmark = pytest.mark.thorough

LENGTHS = (50, 22, 3)  # tokens of the rows of the batch: more than a window's ring of 48 has room for, less, few
PROMPTS = (40, 5, 2)  # three chunks, less than a chunk, less than a window
Tiny = Callable[[str], TinyModel]
Load = Callable[[str, str], Engine]
EAGER = [(name, "eager") for name in BUILDERS]
COMPILED = {  # with those of test_model_parity.py, one model of each kind of block
    **dict.fromkeys(ARCHITECTURES, pytest.mark.slow),
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


@pytest.mark.parametrize(  # eager in the engine matrix, native in test_native_decode.py
    ("name", "graph"), [*(pytest.param(*case, marks=pytest.mark.slow) for case in EAGER), *ALONE]
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
        # variants run slow: test_model_parity.py has their mathematics
        *(pytest.param(*case, marks=() if case[0] in ARCHITECTURES else pytest.mark.slow) for case in EAGER),
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
