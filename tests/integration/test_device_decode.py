"""Decode steps through a GPU's kernels give the logits of the eager modules: every architecture, in the interpreter.

The eager modules are themselves compared with transformers (test_model_parity.py), their float32 logits with golden
ones (test_golden_tiny.py).
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.gpu_kernels import kernels_of, let_programs_be_few, runners_of
from support.kernel_lists import DECODE, store_decode_kernels
from support.tiny_models import ARCHITECTURES, RECURRENT, VOCAB, TinyModel

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.step import BlocksStep, HeadStep

pytestmark = pytest.mark.thorough

CLOSE = 3e-5  # float32, logits of order one; sums are added in another order
PROMPT = 21  # longer than the window of 8, and no multiple of it
WITHOUT_KERNELS = ("gemma4", "gemma4_moe")  # blocks that run compiled instead (graph/gpu/kernel_obstacles.py)
WRITE = f"`pytest tests/integration/{Path(__file__).name} -k written_down --kernel-lists tests/golden`"
Tiny = Callable[[str], TinyModel]
Load = Callable[[str, str], Engine]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    let_programs_be_few(monkeypatch)


def one_by_one(runner: ProgramRunner, row: list[int], tokens: int) -> torch.Tensor:
    """Return the logits after the prompt and after each of some more tokens."""
    steps = [runner.extend([row[:PROMPT]], [0])]
    steps += [runner.extend([[row[at]]], [at]) for at in range(PROMPT, PROMPT + tokens)]
    return torch.cat(steps)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decode_gives_the_eager_logits(name: str, load_tiny: Load, tiny_model: Tiny) -> None:
    runners = runners_of(load_tiny(name, "eager"), batch=1)
    row = tiny_model(name).ids[0].tolist()
    tokens = 2 if name in ("gemma3", "gpt_oss", "qwen3_next") else 1  # the second reads what the first has written
    found, expected = (one_by_one(runner, row, tokens) for runner in (runners.device, runners.eager))
    assert (found - expected).abs().max() < CLOSE


@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt_oss"])
def test_rows_of_different_lengths_and_one_without_a_token_decode_together(
    name: str, load_tiny: Load, tiny_model: Tiny
) -> None:
    runners = runners_of(load_tiny(name, "eager"), batch=3)
    rows, lengths = tiny_model(name).ids.tolist(), [PROMPT, 3]
    logits = []
    for runner in (runners.device, runners.eager):
        runner.extend([row[:length] for row, length in zip(rows, lengths, strict=True)], [0, 0])
        logits.append(runner.extend([[row[length]] for row, length in zip(rows, lengths, strict=True)], lengths))
    assert (logits[0] - logits[1]).abs().max() < CLOSE
    for table in runners.device.pages.tables:  # page 0 is nobody's: a row without a token would write there
        used = {page for row in table.rows for page in row.values()}
        idle = [0, *(page for page in range(1 + table.num_pages) if page not in used and not table.is_ring)]
        assert all(tensor[idle].isnan().all() for cache in table.caches for tensor in cache.tensors)


def greedy(runner: ProgramRunner, prompt: list[int], count: int) -> list[int]:
    """Return the likeliest tokens, one after another."""
    chosen = [int(runner.extend([prompt], [0]).argmax())]
    while len(chosen) < count:
        chosen.append(int(runner.extend([chosen[-1:]], [len(prompt) + len(chosen) - 1]).argmax()))
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_the_eager_ones(name: str, load_tiny: Load, tiny_model: Tiny) -> None:
    runners = runners_of(load_tiny(name, "eager"), batch=1)
    prompt = tiny_model(name).ids[1, :PROMPT].tolist()
    found, expected = (greedy(runner, prompt, 100) for runner in (runners.device, runners.eager))
    assert found == expected


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in WITHOUT_KERNELS])
def test_a_layer_launches_the_kernels_that_are_written_down(
    name: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A kernel more in a layer is about 2 us more of a token for each layer, on a GPU that waits for launches.

    With `--kernel-lists tests/golden` the file is written instead, and the test is skipped.
    """
    engine = Engine.load(tiny_model(name).folder, dtype="bf16", device="cpu", graph="eager")
    runner = runners_of(engine, batch=1).device
    program = runner.program("decode", 1)
    program.state.span.counts.fill_(1)
    embed, *rest = program.steps
    embed.replay()
    blocks = [step for step in rest if isinstance(step, BlocksStep)]
    (head,) = [step for step in rest if isinstance(step, HeadStep)]
    with torch.inference_mode():
        # Three, of which one slides in gpt-oss:
        first, *layers = (kernels_of(step.replay, monkeypatch, interprets=False) for step in blocks[:3])
        if name in RECURRENT:
            del layers[1:]  # it has attention
        found = {
            "first": first,
            "layer": layers[0],
            "head": kernels_of(lambda: head.run(head.head, program.state.hidden[0]), monkeypatch, interprets=False),
        }
    assert all(layer == layers[0] for layer in layers), layers
    expected = json.loads(DECODE.read_text())
    engine.close()
    folder: Path | None = request.config.getoption("--kernel-lists")
    if folder is not None:
        store_decode_kernels(folder / DECODE.name, name, found)
        pytest.fail(f"{folder / DECODE.name} is written: look it through and commit it", pytrace=False)
    assert found == expected.get(name), f"{DECODE.name} should say: {json.dumps({name: found})}; {WRITE} writes it"


def test_hidden_states_are_copies_of_a_stream_that_changes_in_place(load_tiny: Load) -> None:
    runners = runners_of(load_tiny("llama3", "eager"), batch=1)
    found, expected = (runner.hidden_states([[VOCAB // 2]]) for runner in (runners.device, runners.eager))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < CLOSE
