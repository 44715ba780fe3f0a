"""One engine has one cache: a generation that lost it must say so instead of going on with another's keys."""

from pathlib import Path

import pytest
import torch

from graphcore import Engine
from graphcore.errors import ConfigError, GraphError

TINY = Path(__file__).parents[2] / "golden" / "tiny"
IDS = [5, 17, 3, 88, 41]


def engine_of(name: str = "llama3", *overrides: str) -> Engine:
    return Engine.load(TINY / name, dtype="fp32", graph="eager", device="cpu", overrides=list(overrides))


@pytest.mark.parametrize("between", ["generate", "logits", "forward", "stream", "close"])
def test_a_generation_whose_cache_was_used_ends_with_an_error(between: str) -> None:
    engine = engine_of()
    stream = engine.stream(IDS, max_new_tokens=8)
    next(stream)
    calls = {
        "generate": lambda: engine.generate([[1, 2]], max_new_tokens=1),
        "logits": lambda: engine.logits([[1, 2]]),
        "forward": lambda: engine.forward(torch.zeros(1, 2, 64)),
        "stream": lambda: next(engine.stream([1, 2])),
        "close": engine.close,
    }
    calls[between]()
    with pytest.raises(ConfigError, match="another call has used this engine's cache"):
        list(stream)


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
