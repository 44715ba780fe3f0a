"""What needs a GPU: every test here is marked `cuda` and skipped where there is none.

Engines here are float32 unless a test says otherwise, so that a difference is a mistake and not rounding.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from support.streaming import results
from support.tiny_models import TinyModel

from graphcore import Engine

HERE = Path(__file__).parent
DEVICE = torch.device("cuda", 0)
SIZES = ("batch_size=3", "prefill_chunk=16", "context_length=320")

Tiny = Callable[[str], TinyModel]
LoadOnDevice = Callable[..., Engine]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def load_on() -> Iterator[LoadOnDevice]:
    """A function that loads a checkpoint on the device; its engines are closed at the end of the test."""
    engines: list[Engine] = []

    def load(folder: Path, *overrides: str, graph: str = "captured", dtype: str = "fp32", **more: str) -> Engine:
        settings = {"device": "cuda:0", "graph": graph, "dtype": dtype, **more}
        engines.append(Engine.load(folder, overrides=[*SIZES, *overrides], **settings))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()


@pytest.fixture
def resident(load_on: LoadOnDevice) -> Callable[[Path, str, str], Mapping[str, object]]:
    """A function to the results of resident weights on the device: of a checkpoint, a graph kind and a dtype."""

    @cache
    def run(folder: Path, graph: str, dtype: str) -> Mapping[str, object]:
        return results(load_on(folder, graph=graph, dtype=dtype), 40)

    return run
