"""Who calls an engine while it computes: requests run beside one another, other calls between two passes."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.queues import Paced

from graphcore import Engine
from graphcore.errors import BusyError, ConfigError, GraphError

TINY = Path(__file__).parents[2] / "golden" / "tiny"
IDS = [5, 17, 3, 88, 41]
SECONDS = 60.0


def engine_of(name: str = "llama3", *overrides: str) -> Engine:
    return Engine.load(TINY / name, dtype="fp32", graph="eager", device="cpu", overrides=list(overrides))


CALLS: dict[str, Callable[[Engine], object]] = {
    "generate": lambda engine: engine.generate([[1, 2]], max_new_tokens=1),
    "logits": lambda engine: engine.logits([[1, 2]]),
    "forward": lambda engine: engine.forward(torch.zeros(1, 2, 64)),
    "stream": lambda engine: list(engine.stream([1, 2], max_new_tokens=1)),
    "submit": lambda engine: engine.submit([1, 2], max_new_tokens=1).result(),
    "warm_up": lambda engine: engine.warm_up(),
}


@pytest.mark.thorough
@pytest.mark.parametrize("between", CALLS)
@pytest.mark.parametrize("streaming", ["off", "on"])
def test_a_call_inside_the_loop_over_a_stream_does_not_change_it(between: str, streaming: str) -> None:
    engine = engine_of("llama3", "batch_size=2", f"streaming={streaming}")
    expected = [event.token_id for event in engine.stream(IDS, max_new_tokens=8)]
    stream, found = Paced(engine, IDS, 8), []
    for event in stream:
        found.append(event.token_id)
        if len(found) == 3:
            stream.let_go()
            CALLS[between](engine)
    assert found == expected


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3"])
def test_logits_between_two_tokens_leave_the_sequences_as_they_were(name: str) -> None:
    engine = engine_of(name, "batch_size=2")
    expected = [each.token_ids for each in engine.generate([IDS, IDS[:2]], 12, ignore_eos=True)]
    first = Paced(engine, IDS, 12, ignore_eos=True)
    next(first)
    second = engine.submit(IDS[:2], 12, ignore_eos=True)
    looked = threading.Thread(target=lambda: engine.logits([[7] * 20, [9] * 20]))
    looked.start()
    for _ in range(4):
        next(first)
    first.let_go()
    looked.join(SECONDS)
    assert [first.handle.result().token_ids, second.result().token_ids] == expected


@pytest.mark.parametrize("name", [*CALLS, "close"])
def test_a_call_from_a_function_that_the_engine_calls_is_refused_by_name(name: str) -> None:
    refused: list[str] = []

    def call(stage: str, *_: object) -> None:
        with pytest.raises(BusyError) as caught:
            CALLS.get(name, Engine.close)(engine)
        refused.append(str(caught.value))

    engine = engine_of()
    engine._on_progress = call
    engine.generate(IDS, max_new_tokens=2)
    assert refused
    assert refused[0].startswith(f"{name}() was called inside a function that the engine calls while it computes")


def test_an_error_in_on_progress_is_the_callers() -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("in a caller's function")

    engine = engine_of()
    expected = engine.generate(IDS, max_new_tokens=3)[0].token_ids
    engine._on_progress = fail
    with pytest.raises(ZeroDivisionError, match="in a caller's function"):
        engine.generate(IDS, max_new_tokens=3)
    engine._on_progress = lambda *_: None
    assert engine.generate(IDS, max_new_tokens=3)[0].token_ids == expected


def test_closing_ends_a_stream_that_nobody_reads() -> None:
    engine = engine_of("llama3", "context_length=4096")
    stream = engine.stream(IDS, max_new_tokens=4000)
    next(stream)
    engine.close()
    with pytest.raises(ConfigError, match="this engine is closed; load it again"):
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
        ({"temperature": "1"}, "temperature='1' must be a number"),
        ({"temperature": 1.0, "top_k": 2.7}, "top_k=2.7 must be a whole number"),
        ({"temperature": -1e-40}, "must be 0 .greedy. or more"),
        ({"repetition_penalty": 1e-40}, "0.01 to 100"),
    ],
)
def test_odd_arguments_are_refused_by_name(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_of().generate([IDS], **arguments)  # type: ignore[arg-type]
