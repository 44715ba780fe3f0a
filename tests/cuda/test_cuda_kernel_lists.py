"""What a captured decode step runs, kernel by kernel, is what it ran when it was last looked at.

Golden lists lie in tests/golden/kernels, by GPU and torch version. Where there are none, the test fails unless
`--kernel-lists FOLDER` is given: it writes them and is skipped, and whoever looks the lists through commits them.
"""

import pytest
import torch
from support.kernel_lists import compare_or_store, drift, kernels_of, key_of
from support.tiny_models import ARCHITECTURES, TinyModel

from graphcore.engine.program_runner import ProgramRunner
from graphcore.tasks.measuring.random_batch import RandomBatch


@pytest.mark.parametrize("blocks", ["auto", "compiled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_captured_step_runs_the_kernels_that_it_ran(
    name: str, batch: int, blocks: str, tiny_model, load_on, request: pytest.FixtureRequest
) -> None:
    tiny: TinyModel = tiny_model(name)
    engine = load_on(tiny.folder, f"graph.blocks={blocks}", graph="captured", dtype="bf16")
    assert isinstance(engine.runner, ProgramRunner)
    work = RandomBatch(engine, batch, 20, 1, 1, seed=1)
    work.fill()
    found = kernels_of(work.decode)
    assert found, "a step runs something"
    again = kernels_of(work.decode)
    assert drift(again, found) == "", "two steps run the same"
    key, label = key_of(torch.cuda.get_device_name(), torch.__version__), f"{name}, batch {batch}"
    label += ", compiled" if blocks == "compiled" else ""
    compare_or_store(found, key, label, request.config.getoption("--kernel-lists"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_captured_chunk_runs_the_kernels_that_it_ran(
    name: str, tiny_model, load_on, request: pytest.FixtureRequest
) -> None:
    tiny: TinyModel = tiny_model(name)
    engine = load_on(tiny.folder, "graph.prefill=captured", graph="captured", dtype="bf16")
    assert isinstance(engine.runner, ProgramRunner)
    work = RandomBatch(engine, 1, 0, 16, 1, seed=1)
    found = kernels_of(work.prefill)
    assert drift(kernels_of(work.prefill), found) == "", "two chunks run the same"
    key = key_of(torch.cuda.get_device_name(), torch.__version__)
    compare_or_store(found, key, f"{name}, chunk, compiled", request.config.getoption("--kernel-lists"))
