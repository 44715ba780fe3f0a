"""A chat over recurrent states goes on only from tokens that the states hold, those that nobody was given included."""

from contextlib import closing

import pytest
from support.engine_fakes import choose_plainly
from support.fake_cuda import FakeCuda, captured_engine, engine_of, fake_cuda
from support.queues import Paced
from test_device_joins import Call, engine_tokens

MODEL = "qwen3_5"


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch, tiny_model) -> FakeCuda:
    tiny_model(MODEL)  # transformers makes it before a device is faked
    choose_plainly(monkeypatch)
    return fake_cuda(monkeypatch)


@pytest.mark.parametrize("end", ["cancel", "device"])
def test_a_chat_over_recurrent_states_goes_on_from_all_that_the_device_has_run(end: str, tiny_model) -> None:
    folder, history = tiny_model(MODEL).folder, [1, 2, 3, 4, 5, 6]
    with (
        captured_engine(folder) as engine,
        engine_of(folder) as eager,
        closing(Paced(engine, [9, 8], 200, ignore_eos=True)) as other,
    ):
        next(other)
        for _ in range(3):
            chat = engine.submit(history, 12 if end == "device" else 100, ignore_eos=True, reuse_cache=True)
            while len(engine_tokens(chat)) < 12:
                next(other)
            chat.cancel()
            answer = engine_tokens(chat)
            assert tuple(answer) == Call(history, len(answer)).alone(eager)
            history += [*answer, 7, 8]
            again = engine.submit(history, 5, reuse_cache=True, ignore_eos=True)
            while not again.has_ended:
                next(other)
            assert again.result().token_ids == Call(history, 5).alone(eager)
