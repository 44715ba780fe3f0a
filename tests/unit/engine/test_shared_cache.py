"""One engine has one cache: nobody uses it inside a generation, and a wrong call leaves it alone."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphcore import Engine
from graphcore.errors import BusyError, ConfigError, GraphError

TINY = Path(__file__).parents[2] / "golden" / "tiny"
IDS = [5, 17, 3, 88, 41]


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Leave what was there before out of garbage collections: each refused call looks for streams that nobody reaches.

    Among the objects of all tests before these, that takes seconds.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def engine_of(name: str = "llama3", *overrides: str) -> Engine:
    return Engine.load(TINY / name, dtype="fp32", graph="eager", device="cpu", overrides=list(overrides))


@pytest.mark.parametrize("between", ["generate", "logits", "forward", "stream", "warm_up"])
def test_a_call_inside_the_loop_over_a_stream_is_refused_by_name_and_the_stream_goes_on(between: str) -> None:
    engine = engine_of()
    expected = [event.token_id for event in engine.stream(IDS, max_new_tokens=8)]
    calls = {
        "generate": lambda: engine.generate([[1, 2]], max_new_tokens=1),
        "logits": lambda: engine.logits([[1, 2]]),
        "forward": lambda: engine.forward(torch.zeros(1, 2, 64)),
        "stream": lambda: next(engine.stream([1, 2])),
        "warm_up": engine.warm_up,
    }
    found = []
    for event in engine.stream(IDS, max_new_tokens=8):
        with pytest.raises(BusyError, match=rf"^{between}\(\) was called inside stream\(\)"):
            calls[between]()
        found.append(event.token_id)
    assert found == expected
    calls[between]()


def test_a_call_from_inside_another_call_is_refused_by_name() -> None:
    refused: list[str] = []

    def call(stage: str, *_: object) -> None:
        for name in ("generate", "close"):
            with pytest.raises(BusyError) as caught:
                {"generate": lambda: engine.generate(IDS), "close": engine.close}[name]()
            refused.append(str(caught.value))

    engine = engine_of()
    engine._on_progress = call
    engine.generate(IDS, max_new_tokens=2)
    assert refused
    assert refused[0].startswith("generate() was called inside generate()")
    assert refused[1].startswith("close() was called inside generate()")


def test_closing_ends_a_stream_that_is_suspended() -> None:
    engine = engine_of()
    stream = engine.stream(IDS, max_new_tokens=8)
    next(stream)
    engine.close()
    with pytest.raises(ConfigError, match="this engine is closed; load it again"):
        next(stream)


def test_a_stream_refuses_a_wrong_prompt_when_it_is_called() -> None:
    with pytest.raises(ConfigError, match="not in the vocabulary"):
        engine_of().stream([999])


def test_results_can_be_changed_in_place_and_take_part_in_autograd() -> None:
    engine = engine_of()
    logits, layers = engine.logits([IDS], output_hidden_states=True)
    logits -= 1
    hidden = engine.forward(layers[0])
    (hidden * torch.ones(1, requires_grad=True)).sum().backward()
    assert not hidden.is_inference()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_numbers_end_in_an_error_and_not_in_tokens(temperature: float) -> None:
    engine = engine_of()
    with torch.inference_mode():
        engine.runner.builder.decoder.head.norm.weight.fill_(float("nan"))
    with pytest.raises(GraphError, match="not finite"):
        engine.generate([IDS], max_new_tokens=2, temperature=temperature)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
        ({"temperature": None}, "temperature=None must be a number"),
        ({"temperature": 1.0, "top_k": 2.7}, "top_k=2.7 must be a whole number"),
        ({"temperature": 1e-40}, "1e-4 to 1e4"),
        ({"repetition_penalty": 1e-40}, "0.01 to 100"),
    ],
)
def test_odd_arguments_are_refused_by_name(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_of().generate([IDS], **arguments)  # type: ignore[arg-type]
