"""A closed engine gives its memory back at once, also while the caller keeps the engine, so that another model fits."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphcore import Engine

pytestmark = pytest.mark.thorough

SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 16000}
LEFT = 4 << 20  # bytes: the blocks that random weights are made of


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Python's own collection would free what is left, but later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensor_nbytes() -> int:
    """Return the bytes of all tensors that Python still knows."""
    storages = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu":
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "streaming"), [("captured", "off"), ("captured", "on"), ("eager", "on"), ("eager", "off")]
)
@pytest.mark.usefixtures("_no_collector")
def test_a_closed_engine_keeps_no_weights_and_no_cache(graph: str, streaming: str) -> None:
    before = tensor_nbytes()
    overrides = ["model=llama3", *(f"++model.random_config.{key}={value}" for key, value in SHAPE.items())]
    engine = Engine.load(
        Path("random:bf16"), overrides=overrides, device="cpu", graph=graph, dtype="bf16", streaming=streaming
    )
    engine.generate([[1, 2, 3]], max_new_tokens=5, ignore_eos=True)
    assert tensor_nbytes() - before > 32 << 20
    engine.close()
    assert tensor_nbytes() - before < LEFT
    assert "closed" in repr(engine)
