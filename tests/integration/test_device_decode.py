"""Decode steps through a GPU's kernels give the logits of the eager modules: every architecture, in the interpreter.

The eager modules are themselves compared with transformers (test_model_parity.py).
"""

from collections.abc import Callable

import pytest
import torch
from device_runners import let_programs_be_few, runners_of
from tiny_models import ARCHITECTURES, TinyModel

from graphcore import Engine

CLOSE = 3e-5  # float32, logits of order one; sums are added in another order
PROMPT = 21  # longer than the window of 8, and no multiple of it


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    let_programs_be_few(monkeypatch)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "bitnet"])
def test_decode_gives_the_eager_logits(name: str, load_tiny: Callable[[str, str], Engine], tiny_model: Callable[[str], TinyModel]) -> None:
    runners = runners_of(load_tiny(name, "eager"), batch=1)
    row = tiny_model(name).ids[0].tolist()
    for runner in (runners.eager, runners.device):
        runner.feed([row[:PROMPT]], [0])
    for at in range(PROMPT, PROMPT + 3):
        expected, found = (runner.feed([[row[at]]], [at]) for runner in (runners.eager, runners.device))
        assert (found - expected).abs().max() < CLOSE
