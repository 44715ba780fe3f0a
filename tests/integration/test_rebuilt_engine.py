"""An engine that has failed is loaded again while other threads call it, close it, or load it again, too."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import TinyModel

from graphcore import Engine
from graphcore.engine import engine as engine_module
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.sequence_state import SequenceState
from graphcore.errors import BusyError, CheckpointError, ConfigError
from graphcore.progress import ignore_progress

pytestmark = pytest.mark.thorough

SECONDS = 30.0
PROMPT = [5, 17, 3, 80, 41]


class Loading:
    """Loads that wait until they may go on.

    Attributes:
        has_begun: set once a load waits.
        may_go: set when loads may go on.
        made: the models that were loaded.
        reports: False to load without calls of `on_progress`.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_go, self.reports = threading.Event(), threading.Event(), True
        self.made: list[LoadedModel] = []
        self._load = engine_module.load_model
        patch.setattr(engine_module, "load_model", self.load)

    def load(self, settings: Any, on_progress: Any, check: Any) -> LoadedModel:
        """Wait, then load."""
        self.has_begun.set()
        assert self.may_go.wait(SECONDS)
        self.made.append(self._load(settings, on_progress if self.reports else ignore_progress, check))
        return self.made[-1]


@pytest.fixture
def folder(tiny_model: Callable[[str], TinyModel]) -> Path:
    return tiny_model("llama3").folder


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    sizes = ["context_length=64", "prefill_chunk=16", "threads=1", "batching.max_sequences=4"]
    with Engine.load(folder, device="cpu", graph="eager", dtype="fp32", overrides=sizes) as found:
        yield found


def fail(engine: Engine) -> CheckpointError:
    """Let an engine fail for good, as when its disk is gone."""
    error = CheckpointError("the disk is gone")

    def lost() -> None:
        raise error

    engine._queue._check_usable = lost  # type: ignore[method-assign]
    engine._queue.failure = error
    return error


CALLS: dict[str, Callable[[Engine], Any]] = {
    "submit": lambda engine: engine.submit(PROMPT, 4, ignore_eos=True).result(SECONDS).token_ids,
    "generate": lambda engine: engine.generate([PROMPT], 4, ignore_eos=True)[0].token_ids,
    "stream": lambda engine: [event.token_id for event in engine.stream(PROMPT, 4, ignore_eos=True)],
    "a mask": lambda engine: engine.submit(PROMPT, 3, mask=lambda ids: None, ignore_eos=True).result(SECONDS).token_ids,
    "embed": lambda engine: engine.embed([PROMPT]).tolist(),
    "submit_embeddings": lambda engine: engine.submit_embeddings([PROMPT])[0].embedding(),
    "logits": lambda engine: torch.as_tensor(engine.logits([PROMPT])).tolist(),
    "forward": lambda engine: engine.forward(torch.ones(1, 3, engine.config.hidden_size)).tolist(),
    "extend": lambda engine: engine.extend([PROMPT], [SequenceState()]).logits[0].tolist(),
    "between_passes": lambda engine: engine.between_passes(lambda: 5),
    "warm_up": lambda engine: engine.warm_up() and None,
    "runner": lambda engine: engine.runner.sizes,
}


def test_calls_during_a_rebuild_wait_and_get_the_new_model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: call(engine) for name, call in CALLS.items()}
    loading, begun = Loading(monkeypatch), [threading.Event() for _ in CALLS]

    def ask(has_begun: threading.Event, call: Callable[[Engine], Any]) -> Any:
        has_begun.set()
        return call(engine)

    fail(engine)
    before = engine.loaded
    with ThreadPoolExecutor(len(CALLS) + 2) as pool:
        rebuilding = [pool.submit(engine.rebuild) for _ in range(2)]
        assert loading.has_begun.wait(SECONDS)
        answers = [pool.submit(ask, event, call) for event, call in zip(begun, CALLS.values(), strict=True)]
        assert all(event.wait(SECONDS) for event in begun)
        assert [name for name, answer in zip(CALLS, answers, strict=True) if answer.done()] == []
        loading.may_go.set()
        for one in rebuilding:
            one.result(SECONDS)
        for name, answer in zip(CALLS, answers, strict=True):
            found = answer.result(SECONDS)
            same = torch.equal(found, expected[name]) if isinstance(found, torch.Tensor) else found == expected[name]
            assert same, name
    assert len(loading.made) == 1, "two calls of rebuild load one model"
    assert engine.loaded is loading.made[0] is not before


def test_a_call_that_came_before_the_rebuild_raises_the_failure_and_mixes_no_models(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was built for the old model, with the old queue's mask threads."""
    is_built, may_submit = threading.Event(), threading.Event()
    requests = engine._parts.requests
    one = requests.one

    def slow(*given: Any, **named: Any) -> Any:
        built = one(*given, **named)
        is_built.set()
        assert may_submit.wait(SECONDS)
        return built

    monkeypatch.setattr(requests, "one", slow)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(engine.submit, PROMPT, 3, mask=lambda ids: None)
        assert is_built.wait(SECONDS)
        fail(engine)
        engine.rebuild()
        may_submit.set()
        with pytest.raises(CheckpointError, match="the disk is gone"):
            asking.result(SECONDS)
    assert engine.status() == []
    assert len(engine.generate([PROMPT], 3, ignore_eos=True)[0].token_ids) == 3


@pytest.mark.parametrize("reports", [True, False], ids=["sees it while it loads", "sees it after it has loaded"])
def test_a_close_during_a_rebuild_closes_everything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    loading = Loading(monkeypatch)
    loading.reports = reports
    fail(engine)
    with ThreadPoolExecutor(2) as pool:
        rebuilding = pool.submit(engine.rebuild)
        assert loading.has_begun.wait(SECONDS)
        closing = pool.submit(engine.close)
        while not engine._num_closes:
            assert not closing.done(), "it waits for the rebuild, whose model it has to close"
        loading.may_go.set()
        with pytest.raises(ConfigError, match="closed"):
            rebuilding.result(SECONDS)
        closing.result(SECONDS)
    assert [one.runner for one in loading.made] == ([] if reports else [None])
    assert engine.loaded.runner is None
    assert "closed" in repr(engine)
    with pytest.raises((ConfigError, CheckpointError)):
        engine.submit(PROMPT)


def test_whom_a_rebuild_waits_for_never_waits_for_the_rebuild(engine: Engine) -> None:
    """The engine's own thread, and one that holds requests back; the lock is taken as by `rebuild`."""
    is_inside, is_held, may_end = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with engine._rebuilding:
            is_held.set()
            assert may_end.wait(SECONDS)

    def ask() -> None:
        is_inside.set()
        assert is_held.wait(SECONDS)
        engine.submit(PROMPT)

    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(engine.between_passes, ask)
        assert is_inside.wait(SECONDS)
        with engine.holding_back():
            holding = pool.submit(hold)
            assert is_held.wait(SECONDS)
            handle = engine.submit(PROMPT, 2, ignore_eos=True)
        with pytest.raises(BusyError, match="inside a function that the engine calls"):
            asking.result(SECONDS)
        may_end.set()
        holding.result(SECONDS)
        assert len(handle.result(SECONDS).token_ids) == 2
