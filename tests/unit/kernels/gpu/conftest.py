"""Where there is a GPU the kernels' tests run on it, and are among those of `pytest -m cuda`; else interpreted."""

from pathlib import Path

import pytest
import torch
from on_device import launch_on

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.cuda)


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        from triton.runtime.jit import JITFunction

        monkeypatch.setattr(JITFunction, "run", launch_on(torch.device("cuda", 0), JITFunction.run))
