"""Sequences join and leave the steps in which a device chooses tokens, and each gets the answer that it gets alone."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from support.comparisons import Grammar
from support.engine_fakes import choose_plainly, submit_staggered
from support.fake_cuda import FakeCuda, captured_engine, engine_of, fake_cuda
from support.queues import Paced

from graphcore import Engine
from graphcore.engine.batching.device_decode_loop import LAG
from graphcore.engine.output import Generation
from graphcore.engine.request_handle import RequestHandle
from graphcore.errors import GraphError
from graphcore.graph.gpu.sampling import MOST_ENDS

pytestmark = pytest.mark.thorough

SECONDS = 60.0
VOCAB = 96
GREEDY: dict[str, float] = {}
PLAIN = {"temperature": 1.0, "min_p": 0.01, "seed": 1}
NUCLEUS = {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 5}
PENALISED = {"repetition_penalty": 1.4}
SETTINGS = (GREEDY, PLAIN, NUCLEUS, PENALISED)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    choose_plainly(monkeypatch)
    return fake_cuda(monkeypatch)


class Call:
    """A request of a test: a prompt, and the settings of `Engine.submit`."""

    def __init__(self, prompt: Sequence[int], max_new_tokens: int, **settings: Any) -> None:
        self.prompt, self.settings = list(prompt), {"max_new_tokens": max_new_tokens, "ignore_eos": True, **settings}

    def submit(self, engine: Engine, **more: Any) -> RequestHandle:
        return engine.submit(self.prompt, **{**self.settings, **more})

    def alone(self, engine: Engine) -> tuple[int, ...]:
        return self.submit(engine).result(SECONDS).token_ids


def drawn_requests(seed: int, count: int) -> list[Call]:
    """Return requests with prompts of one token, of a chunk and one token more, and of up to three chunks."""
    generator = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt = [generator.randrange(VOCAB) for _ in range(generator.choice((1, 2, 5, 16, 17, 33, 40)))]
        settings = {**generator.choice(SETTINGS), "ignore_eos": generator.random() < 0.5}
        if generator.random() < 0.7:
            settings["seed"] = generator.randrange(1 << 40)
        requests.append(Call(prompt, generator.randint(1, 20), **settings))
    return requests


def end_at(engine: Engine, *ends: int) -> None:
    object.__setattr__(engine.loaded.config, "eos_token_ids", ends)


def what(answer: Generation) -> tuple[tuple[int, ...], str]:
    return answer.token_ids, answer.finish_reason


def replays(cuda: FakeCuda) -> int:
    return sum(graph.num_replays for graph in cuda.graphs)


@pytest.mark.parametrize(("name", "streaming"), [("qwen3", "on"), ("gemma3", "off"), ("gptoss", "off")])
def test_an_answer_does_not_depend_on_who_joins_and_leaves_beside_it(name: str, streaming: str) -> None:
    requests = drawn_requests(3, 12)
    with engine_of(name) as eager, captured_engine(name, f"streaming={streaming}") as engine:
        whole = [request.submit(eager, ignore_eos=True).result(SECONDS).token_ids for request in requests]
        for each in (eager, engine):
            end_at(each, *(tokens[len(tokens) // 2] for tokens in whole[::4]))
        expected = [what(request.submit(eager).result(SECONDS)) for request in requests]
        assert len({reason for _, reason in expected}) == 2
        handles = submit_staggered(engine, [partial(request.submit, engine) for request in requests], random.Random(4))
        assert [what(handle.result(SECONDS)) for handle in handles] == expected
        assert max(handle.result().timings.batch for handle in handles) == 3
        assert engine.status() == []


def test_a_request_joins_between_two_tokens_of_another_and_leaves_before_it() -> None:
    with captured_engine() as engine:
        short, other = Call([9, 8], 5, **PLAIN), Call(range(20), 6)
        expected = [short.alone(engine), other.alone(engine)]
        long = Paced(engine, [1, 2, 3], 40, ignore_eos=True)
        tokens = [next(long).token_id for _ in range(4)]
        handles = [short.submit(engine), other.submit(engine)]
        while not all(handle.has_ended for handle in handles):
            tokens.append(next(long).token_id)
        assert len(tokens) < 20
        assert [handle.result().token_ids for handle in handles] == expected
        tokens += [event.token_id for event in long]
        assert tuple(tokens) == Call([1, 2, 3], 40).alone(engine)


def test_a_row_gives_its_next_sequence_no_token_of_its_last() -> None:
    """The second sequence takes the only row while steps of the first are under way."""
    with captured_engine("qwen3", "batch_size=1") as engine:
        for other in (Call([9, 8], 7), Call([4], 7, **PLAIN), Call(range(40), 7, **NUCLEUS)):
            expected = other.alone(engine)
            for count in (1, 2, 5):
                first = Paced(engine, [1, 2, 3], 60, ignore_eos=True)
                for _ in range(count):
                    next(first)
                second = other.submit(engine)
                first.close()
                assert second.result(SECONDS).token_ids == expected
                assert len(first.handle.result().token_ids) == count


def test_random_cancels_deadlines_and_errors_leave_every_other_answer_as_it_is_alone() -> None:
    requests = drawn_requests(9, 12)
    with captured_engine() as engine:
        alone = {request: what(request.submit(engine).result(SECONDS)) for request in requests}

        def fail(ids: Sequence[int]) -> None:
            if len(ids) == 2:
                raise ZeroDivisionError("in a mask")

        def one(number: int) -> None:
            generator = random.Random(number)
            request, fate = generator.choice(requests), generator.random()
            if fate < 0.1:
                with pytest.raises(ZeroDivisionError):
                    request.submit(engine, max_new_tokens=5, ignore_eos=True, mask=fail).result(SECONDS)
            elif fate < 0.4:
                handle = request.submit(engine, **({"deadline": 0.01} if fate < 0.2 else {}))
                time.sleep(generator.random() * 0.03)
                handle.cancel()
                found, (tokens, reason) = handle.result(SECONDS), alone[request]
                assert found.token_ids == tokens[: len(found.token_ids)]
                assert found.finish_reason in (reason, "interrupted", "deadline")
            elif fate < 0.5:
                request.submit(engine)  # nobody can read it
            elif fate < 0.6:
                assert what(request.submit(engine, reuse_cache=True).result(SECONDS)) == alone[request]
            else:
                assert what(request.submit(engine).result(SECONDS)) == alone[request]

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(one, number) for number in range(60)]:
                done.result(SECONDS)
        assert engine.status() == []


def test_an_end_that_the_device_does_not_know_ends_its_row_a_few_steps_later() -> None:
    """The device knows the 64 lowest end tokens; the host sees the others."""
    with captured_engine() as engine:
        other, full = Call([9, 8], 30), Call([1, 2, 3], 30).alone(engine)
        expected, at = other.alone(engine), next(at for at in range(5, 25) if full[at] not in full[:at])
        end_at(engine, *range(-1 - MOST_ENDS, -1), full[at])
        handles = [Call([1, 2, 3], 30, ignore_eos=False).submit(engine), other.submit(engine)]
        assert [what(handle.result(SECONDS)) for handle in handles] == [(full[: at + 1], "end"), (expected, "length")]


def test_rows_of_all_settings_share_a_graph_and_each_uses_its_own(cuda: FakeCuda) -> None:
    """The graph is the one that the row with most settings needs, while it runs."""
    with captured_engine() as engine:
        requests = [Call([1, 2, 3], 24), Call([9, 8], 12, **PLAIN), Call([5], 6, **NUCLEUS)]
        expected = [request.alone(engine) for request in requests]
        of_phase = [graph.num_replays for graph in cuda.graphs]
        assert of_phase == [23, 11, 6]
        with engine.holding_back():
            handles = [request.submit(engine) for request in requests]
        assert [handle.result(SECONDS).token_ids for handle in handles] == expected
        ran = [graph.num_replays - before for graph, before in zip(cuda.graphs, of_phase, strict=True)]
        assert ran == [12, 6, 6]  # narrow while the last runs, then sample, then the likeliest
        assert engine.runner.captures.num_graphs == 3


def test_a_row_without_a_sequence_and_its_caches_stay_as_they_are() -> None:
    """It would write to page 0, which is nobody's; low pages are given first."""
    with captured_engine("gemma3") as engine, torch.inference_mode():
        caches = engine.runner.builder.caches
        Call(range(20), 9).alone(engine)
        for cache in caches:
            for tensor in cache.tensors:
                tensor[:] = 0.25
        with engine.holding_back():
            handles = [Call(range(20), 30).submit(engine), Call([3], 4, **PLAIN).submit(engine)]
        for handle in handles:
            handle.result(SECONDS)
        tensors = [tensor for cache in caches for tensor in cache.tensors]
        assert all(bool((tensor[page] == 0.25).all()) for tensor in tensors for page in (0, -1))
        assert all(bool((tensor != 0.25).any()) for tensor in tensors)
        assert engine.runner.programs.sampling_rows.state.span.counts.tolist() == [0, 0, 0]


def odd(ids: Sequence[int]) -> torch.Tensor:
    return torch.arange(VOCAB) % 2 == 1


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [([4], NUCLEUS), ([9, 8], GREEDY), (list(range(17)), NUCLEUS)],
    ids=["nucleus-1", "greedy-2", "nucleus-17"],
)
def test_a_mask_narrows_its_own_row_and_keeps_no_other_waiting(
    settings: dict[str, float], prompt: list[int], cuda: FakeCuda
) -> None:
    """Its request takes part in every second step beside another, and its row runs nothing else."""
    masked, gaps = {"mask": odd, "logprobs": True, **settings}, set()
    with engine_of() as eager:
        expected = eager.submit(prompt, 9, ignore_eos=True, **masked).result(SECONDS)
    with captured_engine() as engine:

        def note(*_: object) -> None:
            (request,) = handles[1]._requests
            if len(request.token_ids) > 1:
                gaps.add(
                    engine.runner.programs.sampling_rows.state.span.starts[request.own_row].item()
                    - request.num_computed
                )

        other = Call([1, 2, 3], 20, **PLAIN)
        alone, before = other.alone(engine), replays(cuda)
        with engine.holding_back():
            handles = [other.submit(engine), engine.submit(prompt, 9, ignore_eos=True, **masked)]
            engine._on_progress = note
        assert handles[0].result(SECONDS).token_ids == alone
        found = handles[1].result(SECONDS)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert gaps == {0}
        assert replays(cuda) - before == 19 + (prompt == [4])  # those of the other alone; one runs beside its prompt
        before = replays(cuda)
        assert engine.submit(prompt, 9, ignore_eos=True, **masked).result(SECONDS).token_ids == expected.token_ids
        assert replays(cuda) - before == 8 + (len(prompt) % 16 == 1)


BY_HOST: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {7: 4.0, 50: -100.0}},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4, **NUCLEUS},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "cuts": {"top_n_sigma": 2.0, "xtc_probability": 0.6, "xtc_threshold": 0.02, **NUCLEUS},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": [*range(0, 96, 5)]},
    "top_logprobs": {"top_logprobs": 3, "logprobs": True, **PLAIN},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "forced": {"mask": Grammar(VOCAB, {14: (50, 51, 52), 21: (1, 2)})},
}


@pytest.mark.parametrize("asked", BY_HOST.values(), ids=list(BY_HOST))
def test_what_kernels_do_not_know_is_done_by_the_host_with_the_same_answers(asked: dict[str, Any]) -> None:
    """The answers are those of an engine without a device; a greedy request beside them stays on the device."""

    def own() -> dict[str, Any]:
        return {**asked, "mask": asked["mask"].copy()} if "mask" in asked else asked

    def fields(found: Generation) -> tuple[Any, ...]:
        return what(found), found.stop_reason, [[one.token_id for one in top] for top in found.top_logprobs or ()]

    prompts = ([1, 2, 3], [*range(20)], [5])
    with engine_of() as plain:
        expected = [fields(plain.submit(ids, 14, ignore_eos=True, **own()).result(SECONDS)) for ids in prompts]
    with captured_engine() as engine:
        beside = Call([9, 8], 30)
        alone, running = beside.alone(engine), beside.submit(engine)
        handles = [engine.submit(ids, 14, ignore_eos=True, **own()) for ids in prompts]
        assert [fields(handle.result(SECONDS)) for handle in handles] == expected
        assert running.result(SECONDS).token_ids == alone


def test_an_error_in_a_mask_and_numbers_that_are_none_end_their_own_request() -> None:
    def fail(ids: Sequence[int]) -> None:
        if len(ids) == 3:
            raise ZeroDivisionError("in a mask")

    with captured_engine() as engine:
        other, later = Call([1, 2, 3], 25), [Call([7, at], 9) for at in range(3)]
        expected, afterwards = other.alone(engine), [request.alone(engine) for request in later]
        assert not any(90 in tokens for tokens in (expected, *afterwards))
        with torch.inference_mode():
            engine.runner.builder.decoder.embed_tokens.weight[90] = float("nan")
        with engine.holding_back():
            handles = [Call([90, 4], 9).submit(engine), other.submit(engine)]
            handles.append(engine.submit([5, 6], 9, mask=fail, ignore_eos=True))
        with pytest.raises(GraphError, match="not finite"):
            handles[0].result(SECONDS)
        with pytest.raises(ZeroDivisionError):
            handles[2].result(SECONDS)
        assert handles[1].result(SECONDS).token_ids == expected
        with engine.holding_back():
            handles = [request.submit(engine) for request in later]
        assert [handle.result(SECONDS).token_ids for handle in handles] == afterwards


def test_a_deadline_ends_one_row_and_the_other_goes_on() -> None:
    with captured_engine() as engine:
        request = Call([1, 2, 3], 60)
        full = request.alone(engine)
        engine._on_progress = lambda *_: time.sleep(0.005)
        late, other = request.submit(engine, deadline=0.1), request.submit(engine)
        found = late.result(SECONDS)
        assert found.finish_reason == "deadline"
        assert found.token_ids == full[: len(found.token_ids)]
        assert 0 < len(found.token_ids) < 60
        assert other.result(SECONDS).token_ids == full


def test_calls_between_two_passes_leave_rows_and_steps_under_way_as_they_are() -> None:
    with captured_engine("gemma3") as engine:
        requests = [Call(range(20), 12), Call([4], 12, **NUCLEUS)]
        expected = [request.alone(engine) for request in requests]
        first = Paced(engine, range(20), 12, ignore_eos=True)
        tokens = [next(first).token_id]
        second = requests[1].submit(engine)
        looked = threading.Thread(target=lambda: engine.logits([[7] * 30] * 3))
        looked.start()
        while len(tokens) < 5:
            tokens.append(next(first).token_id)
        first.let_go()
        looked.join(SECONDS)
        assert [first.handle.result().token_ids, second.result(SECONDS).token_ids] == expected


@pytest.mark.parametrize("end", ["cancel", "device"])
def test_a_chat_goes_on_from_all_that_the_device_has_run_while_others_run(end: str) -> None:
    """Gemma's rings of 8 lose keys to each token, those that nobody was given included."""
    history, before = [1, 2, 3, 4, 5, 6], 0
    with (
        captured_engine("gemma3") as engine,
        engine_of("gemma3") as eager,
        closing(Paced(engine, [9, 8], 200, ignore_eos=True)) as other,
    ):
        next(other)
        for _ in range(2):
            chat = engine.submit(history, 12 if end == "device" else 100, ignore_eos=True, reuse_cache=True)
            while len(engine_tokens(chat)) < 12:
                next(other)
            chat.cancel()
            answer = engine_tokens(chat)
            assert tuple(answer) == Call(history, len(answer)).alone(eager)
            ran = len(history) + len(answer) - 1
            history += [*answer, 7, 8]
            again = engine.submit(history, 1, reuse_cache=True)
            while not again.has_ended:
                next(other)
            assert again.cached in ((ran,) if end == "device" else (0, before, ran, ran + 1))  # rings may have moved on
            assert again.result().token_ids == Call(history, 1).alone(eager)
            before = len(history)  # another row's


def engine_tokens(handle: RequestHandle) -> list[int]:
    """Return the tokens that a request has been given so far."""
    (request,) = handle._requests
    return list(request.token_ids)


@pytest.mark.parametrize(("streaming", "lag"), [("off", LAG), ("on", 0)])
def test_the_status_counts_tokens_that_were_launched(streaming: str, lag: int) -> None:
    """While weights move, the host reads each step before it asks for the next."""
    with captured_engine("qwen3", f"streaming={streaming}") as engine:
        stream = Paced(engine, [1, 2, 3], 30, ignore_eos=True)
        for _ in range(6):
            next(stream)
        (status,) = engine.status()
        assert status.new_tokens == 6
        assert status.computed_tokens == 3 + 5 + lag
        stream.close()


@pytest.mark.parametrize("fault", ["error", "give up"])
def test_a_pass_that_fails_leaves_no_row_running(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("streaming=on",) if fault == "give up" else ()
    with captured_engine("qwen3", *overrides) as engine:
        request = Call([9, 8], 8, **PLAIN)
        expected = request.alone(engine)
        assert len(set(expected)) > 4  # a repeating answer would not show a lost token
        handles = [Call([1, 2, 3], 300).submit(engine, reuse_cache=True) for _ in range(2)]
        for handle in handles:
            assert handle.event(3) is not None
        if fault == "error":
            break_once(engine, monkeypatch)
            for handle in handles:
                with pytest.raises(RuntimeError, match="broken"):
                    handle.result(SECONDS)
        for handle in handles:
            handle.cancel()
        assert [each.submit(engine).result(SECONDS).token_ids for each in [request] * 3] == [expected] * 3
        assert engine.runner.programs.sampling_rows.state.span.counts.tolist() == [0, 0, 0]


def break_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next step of the running graph fail, once."""
    steps = [step for program in engine.runner.programs._of_width.values() for step in program.steps]
    replay: Callable[[Any], None] = type(steps[0]).replay
    is_broken: list[bool] = []

    def broken(step: Any) -> None:
        if not is_broken:
            is_broken.append(True)
            raise RuntimeError("broken")
        replay(step)

    monkeypatch.setattr(type(steps[0]), "replay", broken)
