"""Where there is a GPU the kernels' tests run on it, and are among those of `pytest -m cuda`; else interpreted."""

from pathlib import Path

import pytest
import torch
from support.gpu_kernels import launch_on

HERE = Path(__file__).parent
COMPILES = "test_gpu_compile"  # for GPUs that are not there


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents and item.path.stem != COMPILES:
                item.add_marker(pytest.mark.cuda)


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        from triton.runtime.jit import JITFunction

        monkeypatch.setattr(JITFunction, "run", launch_on(torch.device("cuda", 0), JITFunction.run))
        take_tiles_of_a_gpu(monkeypatch)


def take_tiles_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have packed matrices' kernels choose the tiles that they choose on a GPU, though they are given CPU tensors."""
    from graphcore.kernels.gpu.packed import few_tokens, level_planes, program_tiles, to_dense

    own = program_tiles.INTERPRETED

    def tile(name: str, rows: int, x: torch.Tensor) -> program_tiles.Tile:
        given = program_tiles.INTERPRETED  # a test may ask for a tile of its own
        return program_tiles.tile_for(name, rows, x.to("meta")) if given is own else given

    monkeypatch.setattr(few_tokens, "tile_for", tile)
    monkeypatch.setattr(to_dense, "INTERPRETED_ROWS", to_dense.ROWS)
    monkeypatch.setattr(level_planes, "INTERPRETED_BLOCKS", level_planes.BLOCKS)
