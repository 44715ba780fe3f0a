"""Inference mode and one thread for every test here; a compiler that traces but makes no C++, for those that ask."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose much where the machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace, guard and count as always, but run what was traced as it is: no C++ is compiled."""
    whole = torch.compile

    def traced(function: Callable[..., Tensor], fullgraph: bool, dynamic: bool, options: object) -> object:
        return whole(function, backend="eager", fullgraph=fullgraph, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", traced)
