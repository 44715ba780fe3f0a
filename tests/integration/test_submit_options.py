"""What programs ask of a request: log probabilities, penalties, masks, embeddings, ids, each against a reference."""

import asyncio
import gc
import random
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.comparisons import Grammar, allowed_after, words_of
from support.tiny_models import VOCAB, TinyModel, add_tokenizer
from torch import Tensor
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

from graphcore import Engine
from graphcore.engine.output import Generation, TokenEvent
from graphcore.engine.sequence_state import SequenceState
from graphcore.errors import BusyError, CheckpointError, ConfigError

Tiny = Callable[[str], TinyModel]
SECONDS = 120.0
PROMPT = [5, 17, 3, 80, 41]
SIZES = ("batching.max_sequences=6", "context_length=96", "prefill_chunk=16")
KINDS = {
    "captured": ("graph=auto",),
    "eager": ("graph=eager",),
    "streamed": ("graph=auto", "streaming=on"),
}


def load(folder: Path, *overrides: str) -> Engine:
    return Engine.load(folder, dtype="fp32", device="cpu", overrides=[*SIZES, *overrides])


@pytest.fixture(scope="module")
def folder(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer."""
    path = tmp_path_factory.mktemp("with_tokenizer") / "llama3"
    shutil.copytree(tiny_model("llama3").folder, path)
    add_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with load(folder) as engine:
        yield engine


def greedy(tiny: TinyModel, tokens: int, change: Callable[[Tensor, list[int]], Tensor]) -> list[int]:
    """Return the likeliest tokens after PROMPT by transformers' logits, which `change` changes for each token."""
    answer: list[int] = []
    for _ in range(tokens):
        logits = tiny.logits_of(torch.tensor([[*PROMPT, *answer]]))[0, -1]
        answer.append(int(change(logits.clone(), answer).argmax()))
    return answer


def vllm_penalties(logits: Tensor, answer: Sequence[int], frequency: float, presence: float) -> Tensor:
    """vLLM's definition, vllm/model_executor/layers/utils.py, `apply_penalties`: of the answer's tokens alone."""
    for token_id, count in Counter(answer).items():
        logits[token_id] -= frequency * count
        logits[token_id] -= presence
    return logits


@pytest.mark.parametrize(
    ("frequency", "presence"), [(0.4, 0.0), (0.0, 1.5), (1.1, -0.5), (-0.8, 0.0)], ids=lambda value: str(value)
)
def test_penalties_of_new_tokens_are_those_of_vllm(
    engine: Engine, tiny_model: Tiny, frequency: float, presence: float
) -> None:
    expected = greedy(tiny_model("llama3"), 24, lambda logits, ids: vllm_penalties(logits, ids, frequency, presence))
    asked = {"frequency_penalty": frequency, "presence_penalty": presence}
    found = engine.generate([PROMPT], 24, ignore_eos=True, **asked)[0]
    assert list(found.token_ids) == expected
    assert expected != greedy(tiny_model("llama3"), 24, lambda logits, _: logits)


def test_bias_and_repetition_penalty_are_those_of_transformers(engine: Engine, tiny_model: Tiny) -> None:
    bias = {9: 3.0, 40: -100.0, 60: 1.5}
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(1.3),
        ]
    )

    def change(logits: Tensor, answer: list[int]) -> Tensor:
        return processors(torch.tensor([[*PROMPT, *answer]]), logits[None])[0]

    expected = greedy(tiny_model("llama3"), 20, change)
    asked: dict[str, Any] = {"logit_bias": bias, "repetition_penalty": 1.3}
    assert list(engine.generate([PROMPT], 20, ignore_eos=True, **asked)[0].token_ids) == expected
    as_json = {"logit_bias": {str(token_id): value for token_id, value in bias.items()}, "repetition_penalty": 1.3}
    assert list(engine.generate([PROMPT], 20, ignore_eos=True, **as_json)[0].token_ids) == expected


def test_min_tokens_hides_ends_as_transformers_does(engine: Engine, tiny_model: Tiny) -> None:
    plain = greedy(tiny_model("llama3"), 12, lambda logits, _: logits)
    stop = plain[3]
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, [stop])

    def change(logits: Tensor, answer: list[int]) -> Tensor:
        return processor(torch.tensor([[*PROMPT, *answer]]), logits[None])[0]

    early = engine.generate([PROMPT], 12, ignore_eos=True, stop_token_ids=[stop])[0]
    assert list(early.token_ids) == plain[: plain.index(stop) + 1]
    assert (early.finish_reason, early.stop_reason) == ("stop", stop)
    late = engine.generate([PROMPT], 12, ignore_eos=True, stop_token_ids=[stop], min_tokens=7)[0]
    expected = greedy(tiny_model("llama3"), 12, change)
    expected = expected[: expected.index(stop) + 1] if stop in expected else expected
    assert list(late.token_ids) == expected
    assert len(late.token_ids) > 7


def test_a_stop_string_counts_only_after_min_tokens(engine: Engine) -> None:
    whole = engine.generate([PROMPT], 16, ignore_eos=True)[0]
    stop = whole.text[2:4]
    early = engine.generate([PROMPT], 16, stop=stop, ignore_eos=True)[0]
    assert (early.finish_reason, early.stop_reason) == ("stop", stop)
    late = engine.generate([PROMPT], 16, stop=stop, ignore_eos=True, min_tokens=10)[0]
    assert late.token_ids[:10] == whole.token_ids[:10]
    assert len(late.token_ids) >= 10


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty=2.5 must be -2 to 2"),
        ({"min_tokens": -1}, "min_tokens=-1 must be 0"),
        ({"logit_bias": {3: 101}}, "token 3 is 101"),
        ({"logit_bias": {VOCAB: 1}}, f"token id {VOCAB} is not in the vocabulary"),
        ({"logit_bias": [1, 2]}, "must map token ids to numbers"),
        ({"logit_bias": {"x": 1}}, "must map token ids to numbers"),
        ({"stop_token_ids": "12"}, "must be a list of token ids"),
        ({"stop_token_ids": [-1]}, "token id -1 is not in the vocabulary"),
        ({"dry_sequence_breakers": "x"}, "must be a list of texts"),
        ({"top_logprobs": 21}, "must be a whole number from 0 to 20"),
        ({"prompt_logprobs": True}, "must be a whole number from 0 to 20"),
        ({"skip_special_tokens": 1}, "must be True or False"),
        ({"mask": 3}, r"must be a function of the new tokens"),
    ],
    ids=str,
)
def test_what_is_no_value_is_refused_by_name(engine: Engine, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine.submit(PROMPT, 4, **asked)


@pytest.mark.parametrize(
    ("name", "streaming"), [("llama3", "off"), ("gemma3", "on"), ("qwen3_5", "off"), ("gpt_oss", "on")]
)
def test_log_probabilities_have_the_bits_of_logits(tiny_model: Tiny, name: str, streaming: str) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (1, 2, 16, 17, 40)]
    with load(tiny_model(name).folder, f"streaming={streaming}") as engine:
        handles = [engine.submit(ids, 3, ignore_eos=True, top_logprobs=4, prompt_logprobs=5) for ids in prompts]
        for ids, handle in zip(prompts, handles, strict=True):
            found = handle.result(SECONDS)
            logits = engine.logits([ids])
            assert isinstance(logits, Tensor)
            logprobs = logits[0].log_softmax(dim=-1)
            assert found.prompt_logprobs is not None
            assert found.top_logprobs is not None
            assert [one.token_id for one in found.prompt_logprobs] == ids
            assert found.prompt_logprobs[0].logprob is None
            for row, one in zip(logprobs[:-1], found.prompt_logprobs[1:], strict=True):
                assert one.logprob == float(row[one.token_id])
                assert [pair.logprob for pair in one.top] == row.topk(5).values.tolist()
                assert all(float(row[pair.token_id]) == pair.logprob for pair in one.top)
            assert len(found.top_logprobs) == 3
            states: Sequence[SequenceState] = [SequenceState()]
            given = [ids, *([token_id] for token_id in found.token_ids)]
            for new, token_id, top in zip(given, found.token_ids, found.top_logprobs, strict=False):
                extension = engine.extend([new], states)
                row, states = extension.logits[0][-1].log_softmax(dim=-1), extension.states
                assert [one.logprob for one in top] == row.topk(4).values.tolist()
                assert top[0].token_id == token_id
            assert found.logprobs is None


def test_a_prompt_whose_log_probabilities_are_asked_for_comes_from_no_cache(engine: Engine) -> None:
    prompt = [*range(40)]
    plain = engine.submit(prompt, 2, ignore_eos=True).result(SECONDS)
    assert engine.submit(prompt, 2, ignore_eos=True).result(SECONDS).timings.cached_tokens > 0
    found = engine.submit(prompt, 2, prompt_logprobs=0, ignore_eos=True).result(SECONDS)
    assert found.timings.cached_tokens == 0
    assert found.token_ids == plain.token_ids
    assert found.prompt_logprobs is not None
    assert [one.top for one in found.prompt_logprobs] == [()] * 40


@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt2", "qwen3_5", "qwen3_moe"])
def test_embeddings_are_transformers_hidden_states(tiny_model: Tiny, name: str) -> None:
    tiny = tiny_model(name)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (1, 5, 16, 17, 45, 2)]
    with load(tiny.folder) as engine, torch.no_grad():
        states = [tiny.reference.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
        for pooling, expected in (
            ("mean", torch.stack([one.mean(dim=0) for one in states])),
            ("last", torch.stack([one[-1] for one in states])),
        ):
            found = engine.embed(prompts, pooling, normalize=False)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            normed = engine.embed(prompts, pooling)
            torch.testing.assert_close(normed, torch.nn.functional.normalize(expected), rtol=1e-5, atol=1e-5)
        assert engine.embed([]).shape == (0, engine.config.hidden_size)
        with pytest.raises(ConfigError, match="pooling='max' must be one of: mean, last"):
            engine.embed(prompts, "max")


def test_embeddings_run_beside_answers_and_change_none(engine: Engine) -> None:
    alone, vectors = engine.generate([PROMPT], 30, ignore_eos=True)[0], engine.embed([[*range(50)], [1, 2]])
    running = engine.submit(PROMPT, 30, ignore_eos=True)
    assert torch.equal(engine.embed([[*range(50)], [1, 2]]), vectors)
    assert running.result(SECONDS).token_ids == alone.token_ids


def masked_greedy(tiny: TinyModel, tokens: int) -> list[int]:
    return greedy(tiny, tokens, lambda logits, ids: logits.masked_fill(~allowed_after(ids, VOCAB), float("-inf")))


def test_a_mask_may_be_a_function_or_an_object_of_words(engine: Engine, tiny_model: Tiny) -> None:
    expected = masked_greedy(tiny_model("llama3"), 12)
    forms: list[Any] = [
        lambda ids: allowed_after(ids, VOCAB),
        lambda ids: words_of(allowed_after(ids, VOCAB)),
        lambda ids: torch.from_numpy(words_of(allowed_after(ids, VOCAB))),
        Grammar(VOCAB),
    ]
    for mask in forms:
        assert list(engine.submit(PROMPT, 12, mask=mask, ignore_eos=True).result(SECONDS).token_ids) == expected
    assert (forms[-1].calls, forms[-1].token_ids) == ([], []), "a copy is used, so that it can be submitted again"
    lonely = Lonely(VOCAB)
    assert list(engine.submit(PROMPT, 12, mask=lonely, ignore_eos=True).result(SECONDS).token_ids) == expected
    assert lonely.calls[:3] == ["begin", "forced", "take"]
    assert lonely.token_ids == expected[:-1]


class Lonely(Grammar):
    """A mask that cannot be copied."""

    copy = None  # type: ignore[assignment]


def test_answers_of_one_call_have_a_mask_each(engine: Engine) -> None:
    handle = engine.submit(PROMPT, 12, n=3, mask=Grammar(VOCAB), ignore_eos=True, temperature=1.5, seed=4)
    for answer in handle.results(SECONDS):
        for before, after in pairwise((3, *answer.token_ids)):
            assert bool(allowed_after([before], VOCAB)[after])

    with pytest.raises(ConfigError, match="3 answers need a copy of it each"):
        engine.submit(PROMPT, 4, n=3, mask=Lonely(VOCAB))


FORCED = {14: (50, 51, 52), 52: (60,), 21: (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)}


@pytest.mark.parametrize("kind", ["captured", "eager", "streamed"])
def test_forced_tokens_have_the_bits_of_tokens_one_by_one(tiny_model: Tiny, kind: str) -> None:
    """What follows them is what follows when each was the only token that a mask allowed."""
    with load(tiny_model("llama3").folder, *KINDS[kind]) as engine:

        def one_by_one(ids: Sequence[int]) -> Tensor:
            queue: list[int] = []
            for index, token_id in enumerate(ids):
                if queue:
                    assert queue.pop(0) == token_id
                queue = queue or list(FORCED.get(token_id, ()) if index >= 0 else ())
            allowed = torch.zeros(VOCAB, dtype=torch.bool)
            allowed[queue[0] if queue else slice(None)] = True
            return allowed if queue else allowed_after(ids, VOCAB)

        for start in (14, 21, 7):
            prompt = [*PROMPT, start]
            grammar = Grammar(VOCAB, FORCED)
            forced = engine.submit(prompt, 30, mask=grammar, ignore_eos=True, temperature=0.9, seed=start).result(
                SECONDS
            )
            plain = engine.submit(prompt, 30, mask=one_by_one, ignore_eos=True, temperature=0.9, seed=start)
            assert forced.token_ids == plain.result(SECONDS).token_ids
            logits = engine.logits([[*prompt, *forced.token_ids]])
            assert isinstance(logits, Tensor)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_forced_tokens_of_several_requests_share_the_rows_of_a_step_and_may_be_late(
    engine: Engine, seconds: float
) -> None:
    """Six rows, and five requests that would run four tokens each; late masks let their requests sit out steps."""
    after = {token: tuple((token + at) % VOCAB for at in range(1, 4)) for token in range(0, VOCAB, 2)}

    def ask(number: int, seconds: float) -> Any:
        mask = Grammar(VOCAB, after, seconds)
        return engine.submit([number, 7], 24, mask=mask, ignore_eos=True, temperature=1.1, seed=number)

    alone = [ask(number, 0.0).result(SECONDS).token_ids for number in range(5)]
    with engine.holding_back():
        handles = [ask(number, seconds) for number in range(5)]
    assert [handle.result(SECONDS).token_ids for handle in handles] == alone


def test_forced_tokens_run_together_and_are_sampled_where_log_probabilities_are_asked_for(engine: Engine) -> None:
    after = {token: ((token + 1) % VOCAB, (token + 2) % VOCAB, (token + 3) % VOCAB) for token in range(VOCAB)}
    passes: list[int] = []
    step = engine.runner.programs.step

    def counted(tokens: Any) -> Any:
        passes.append(sum(len(ids) for ids, _ in tokens.values()))
        return step(tokens)

    engine.runner.programs.step = counted  # type: ignore[method-assign]
    try:
        answer = engine.submit(PROMPT, 25, mask=Grammar(VOCAB, after), ignore_eos=True).result(SECONDS)
    finally:
        engine.runner.programs.step = step  # type: ignore[method-assign]
    assert max(passes) > 1
    assert len(passes) < 25
    assert all(later == (token + 1) % VOCAB for token, later in pairwise(answer.token_ids[1:4]))
    with_logprobs = engine.submit(PROMPT, 25, mask=Grammar(VOCAB, after), ignore_eos=True, logprobs=True)
    assert len(with_logprobs.result(SECONDS).logprobs or ()) == 25


def test_a_slow_mask_keeps_no_other_request_waiting(engine: Engine) -> None:
    alone = engine.submit(PROMPT, 60, ignore_eos=True).result(SECONDS)
    is_free = threading.Event()

    def slow(ids: Sequence[int]) -> Tensor:
        is_free.wait(SECONDS)
        return allowed_after(ids, VOCAB)

    waiting = engine.submit(PROMPT, 4, mask=slow, ignore_eos=True)
    other = engine.submit(PROMPT, 60, ignore_eos=True)
    assert other.result(SECONDS).token_ids == alone.token_ids
    assert not waiting.has_ended
    assert [one.state for one in engine.status()] == ["prefill"]
    is_free.set()
    assert len(waiting.result(SECONDS).token_ids) == 4


@pytest.mark.parametrize(
    ("mask", "error", "said"),
    [
        (lambda ids: 1 / 0, ZeroDivisionError, "division"),
        (lambda ids: "x", ConfigError, "found str"),
        (lambda ids: torch.zeros(VOCAB, dtype=torch.bool), ConfigError, "mask allows no token"),
        (Grammar(VOCAB, dict.fromkeys(range(VOCAB), (VOCAB,))), ConfigError, r"forced\(\) must return token ids"),
    ],
    ids=["raises", "garbage", "nothing", "no token"],
)
def test_a_mask_that_fails_ends_its_own_request_alone(engine: Engine, mask: Any, error: type, said: str) -> None:
    other = engine.submit(PROMPT, 20, ignore_eos=True)
    with pytest.raises(error, match=said):
        engine.submit(PROMPT, 5, mask=mask, ignore_eos=True).result(SECONDS)
    assert len(other.result(SECONDS).token_ids) == 20


def test_a_mask_cannot_wait_for_the_engine_that_waits_for_it(engine: Engine) -> None:
    def ask(ids: Sequence[int]) -> None:
        engine.generate([PROMPT], 1)

    with pytest.raises(BusyError, match="inside a function that the engine calls"):
        engine.submit(PROMPT, 3, mask=ask).result(SECONDS)


def test_special_tokens_are_in_the_text_if_asked_for(engine: Engine) -> None:
    special = next(iter(sorted(engine.tokenizer.special_ids)))
    force = Grammar(VOCAB, dict.fromkeys(range(VOCAB), (special, 10)))
    shown = engine.submit(PROMPT, 6, mask=force.copy(), ignore_eos=True, skip_special_tokens=False).result(SECONDS)
    hidden = engine.submit(PROMPT, 6, mask=force.copy(), ignore_eos=True).result(SECONDS)
    assert shown.token_ids == hidden.token_ids
    assert special in shown.token_ids
    name = engine.tokenizer.id_to_piece(special)
    assert name
    assert name in shown.text
    assert name not in hidden.text
    assert shown.text == engine.tokenizer.decode(shown.token_ids, skip_special_tokens=False)


def what(answer: Generation) -> tuple[Any, ...]:
    kept = answer.token_ids, answer.finish_reason, answer.logprobs, answer.top_logprobs, answer.prompt_logprobs
    return (*kept, answer.stop_reason, answer.text)


def mixed_requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Return the arguments of requests with everything that `submit` knows, drawn at random."""
    generator = random.Random(seed)
    drawn: list[dict[str, Any]] = []
    for number in range(count):
        length = generator.choice((1, 2, 5, 16, 17, 33))
        asked: dict[str, Any] = {
            "prompt": [generator.randrange(VOCAB) for _ in range(length)],
            "max_new_tokens": generator.randint(1, 12),
            "ignore_eos": generator.random() < 0.7,
        }
        options: list[dict[str, Any]] = [
            {"logit_bias": {generator.randrange(VOCAB): generator.uniform(-5, 5) for _ in range(3)}},
            {"presence_penalty": 0.7, "frequency_penalty": -0.3},
            {"repetition_penalty": 1.2},
            {"min_tokens": 6, "stop_token_ids": [generator.randrange(VOCAB) for _ in range(20)]},
            {"top_logprobs": 3, "logprobs": True},
            {"prompt_logprobs": 2},
            {"temperature": 1.1, "seed": number, "top_p": 0.9},
            {"n": 2, "temperature": 0.8},
            {"deadline": 600.0},
            {"skip_special_tokens": False},
        ]
        for option in generator.sample(options, 3):
            asked |= option
        if generator.random() < 0.4:
            asked["mask"] = partial(Grammar, VOCAB, generator.choice(({}, FORCED)))
        drawn.append(asked)
    return drawn


def submit(engine: Engine, asked: dict[str, Any]) -> Any:
    more = dict(asked)
    if "mask" in more:
        more["mask"] = more["mask"]()  # each run has a mask of its own
    return engine.submit(more.pop("prompt"), **more)


@pytest.mark.slow
def test_a_storm_of_ten_thousand_requests_leaves_no_memory_and_no_page_behind(tiny_model: Tiny) -> None:
    """Eight threads submit requests of all kinds, cancel some, drop some; each whole answer is that of one alone."""
    process = psutil.Process()
    with load(tiny_model("gemma3").folder, "batching.max_waiting=64") as engine:
        requests = mixed_requests(11, 60)
        alone = [[what(one) for one in submit(engine, asked).results(SECONDS)] for asked in requests]
        vectors = engine.embed([[*range(20)], [4]])

        def one(number: int) -> None:
            generator = random.Random(number)
            at, fate = generator.randrange(len(requests)), generator.random()
            if fate < 0.05:
                assert torch.equal(engine.embed([[*range(20)], [4]]), vectors)
                return
            try:
                handle = submit(engine, requests[at])
            except BusyError:
                return
            if fate < 0.15:
                handle.cancel()
            elif fate >= 0.2:  # else nobody reads it
                assert [what(each) for each in handle.results(SECONDS)] == alone[at]

        sizes = []
        with ThreadPoolExecutor(8) as pool:
            for begin in range(0, 10_000, 1000):
                list(pool.map(one, range(begin, begin + 1000)))
                sizes.append(process.memory_info().rss >> 20)
        deadline = time.monotonic() + SECONDS
        while engine.status() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.status() == []
        engine._queue.run_alone("test", lambda: None)  # the last have left
        pages: Any = engine.runner
        assert all(not held for table in pages.pages.tables for held in table.rows)
        assert max(sizes[5:]) - max(sizes[:5]) < 24, sizes


def test_streams_of_one_event_loop_are_woken_once_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_all(loop: asyncio.AbstractEventLoop) -> tuple[list[int], int]:
        calls = 0
        before = loop.call_soon_threadsafe

        def counted(*arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += threading.current_thread().name == "graphcore"
            return before(*arguments, **more)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        async def read(handle: Any) -> int:
            return len([event async for event in handle])

        with engine.holding_back():
            handles = [engine.submit([at, 2, 3], 40, ignore_eos=True) for at in range(6)]
        tokens = await asyncio.gather(*map(read, handles))
        return tokens, calls

    async def main() -> tuple[list[int], int]:
        return await read_all(asyncio.get_running_loop())

    tokens, calls = asyncio.run(main())
    assert tokens == [40] * 6
    assert calls <= 60, "six streams of 40 tokens share their steps"


def test_status_tells_ids_times_and_pages(engine: Engine) -> None:
    is_free = threading.Event()

    def hold(ids: Sequence[int]) -> Tensor:
        if len(ids) == 2:
            is_free.wait(SECONDS)
        return torch.ones(VOCAB, dtype=torch.bool)

    handles = [engine.submit([at, *range(20)], 5, mask=hold, ignore_eos=True, request_id=f"r{at}") for at in range(6)]
    late = engine.submit([1, 2], 5)
    deadline = time.monotonic() + SECONDS
    while [one.new_tokens for one in engine.status()][:6] != [2] * 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    running, waiting = engine.status()[:6], engine.status()[6:]
    assert (
        [one.request_id for one in running]
        == [handle.request_id for handle in handles]
        == [f"r{at}" for at in range(6)]
    )
    assert {one.state for one in running} == {"decode"}
    assert {(one.pages > 0, one.new_tokens, one.prompt_tokens) for one in running} == {(True, 2, 21)}
    assert all(one.decode_seconds > 0 and one.prefill_seconds > 0 for one in running)
    assert [(one.request_id, one.state, one.pages, one.is_running) for one in waiting] == [
        (late.request_id, "waiting", 0, False)
    ]
    assert waiting[0].waiting_seconds > 0
    is_free.set()
    for handle in (*handles, late):
        handle.result(SECONDS)


def test_an_engine_whose_disk_is_gone_says_so_and_is_rebuilt(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama3").folder, tmp_path / "llama3"))
    with load(folder, "streaming=on") as engine:
        expected = engine.generate([PROMPT], 6, ignore_eos=True)[0].token_ids
        assert engine.failure is None
        away = (folder / "model.safetensors").rename(tmp_path / "away")
        with pytest.raises(CheckpointError, match="deleted"):
            engine.generate([PROMPT], 6, ignore_eos=True)
        assert isinstance(engine.failure, CheckpointError)
        with pytest.raises(CheckpointError, match="deleted"):
            engine.submit(PROMPT, 6)
        shutil.copy(away, folder / "model.safetensors")  # another file: the open one is gone
        with pytest.raises(CheckpointError, match="again"):
            engine.submit(PROMPT, 6)
        engine.rebuild()
        assert engine.failure is None
        assert engine.generate([PROMPT], 6, ignore_eos=True)[0].token_ids == expected


def test_a_failed_pass_that_others_survive_is_no_failure_of_the_engine(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_model("llama3").folder) as engine:
        expected = engine.generate([PROMPT], 6, ignore_eos=True)[0].token_ids
        with monkeypatch.context() as broken:
            broken.setattr(engine.runner, "forward_pass", cache(lambda *_: None))
            with pytest.raises(TypeError):
                engine.generate([PROMPT], 6, ignore_eos=True)
        assert engine.failure is None
        assert engine.generate([PROMPT], 6, ignore_eos=True)[0].token_ids == expected


def test_the_fallback_says_what_it_cannot(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3").folder, "model.fallback=transformers", "graph=eager") as engine:
        expected = masked_greedy(tiny_model("llama3"), 8)
        assert list(engine.submit(PROMPT, 8, mask=Grammar(VOCAB, FORCED), ignore_eos=True).result(SECONDS).token_ids)
        found = engine.submit(PROMPT, 8, mask=Grammar(VOCAB), ignore_eos=True, top_logprobs=2, frequency_penalty=0.0)
        assert list(found.result(SECONDS).token_ids) == expected
        assert len(found.result().top_logprobs or ()) == 8
        for call in (lambda: engine.embed([PROMPT]), lambda: engine.submit(PROMPT, prompt_logprobs=1)):
            with pytest.raises(ConfigError, match=r"needs graphcore's own programs; leave out model.fallback"):
                call()


def test_a_run_of_tokens_may_lie_in_two_programs_of_a_step(tiny_model: Tiny) -> None:
    """Steps of more than 16 tokens take several programs; only a run's last token is followed by a sampled one."""
    runs = {row: ([row + at for at in range(7)], 0) for row in range(3)}
    with load(tiny_model("llama3").folder, "batching.max_sequences=24") as engine, engine.holding_back():
        runner: Any = engine.runner
        for row, (ids, start) in runs.items():
            runner.reserve(row, start, len(ids))
        steps = runner.programs.step(runs)
        cut = [step.rows for step in steps]
        assert cut == [{0: range(7), 1: range(7, 11)}, {1: range(3), 2: range(3, 10)}], (
            "11 and 10 tokens: the second run is cut"
        )
        with runner.forward_pass([step.program for step in steps], [], runner.policy):
            found = {row: step.program.state.logits[at[-1]].clone() for step in steps for row, at in step.rows.items()}
        for row in runs:
            runner.pages.free(row)
    with load(tiny_model("llama3").folder) as engine:
        for row, (ids, _) in runs.items():
            expected = engine.logits([ids], by_token=True)
            assert isinstance(expected, Tensor)
            assert torch.equal(found[row], expected[0, -1])


def test_a_mask_of_a_request_that_waits_cannot_call_the_engine_either(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3").folder, "batching.max_sequences=1") as engine:

        def ask(ids: Sequence[int]) -> None:
            engine.generate([PROMPT], 1)

        for _ in range(5):
            with pytest.raises(BusyError, match="inside a function that the engine calls"):
                engine.submit(PROMPT, 3, mask=ask).result(SECONDS)


def test_a_late_mask_of_the_fallback_lets_deadlines_pass_and_the_engine_close(tiny_model: Tiny) -> None:
    is_free = threading.Event()
    with load(tiny_model("llama3").folder, "model.fallback=transformers", "graph=eager") as engine:
        late = engine.submit(PROMPT, 4, mask=lambda _: is_free.wait(SECONDS) and None, deadline=0.3)
        assert late.result(SECONDS).finish_reason == "deadline"
        left = engine.submit(PROMPT, 4, mask=lambda _: is_free.wait(SECONDS) and None)
    is_free.set()
    with pytest.raises(ConfigError, match="closed"):
        left.result(SECONDS)


def test_a_pass_after_which_caches_cannot_be_cleaned_up_ends_everybody(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_model("llama3").folder, "batching.max_sequences=1") as engine:
        batching: Any = engine.batching

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("the device is gone")

        with engine.holding_back():
            handles = [engine.submit(PROMPT, 5), engine.submit(PROMPT, 5)]
            monkeypatch.setattr(batching, "run", fail)
            monkeypatch.setattr(batching, "fail", fail)
        for handle in handles:
            with pytest.raises(RuntimeError, match="the device is gone"):
                handle.result(SECONDS)
        assert isinstance(engine.failure, RuntimeError)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.submit(PROMPT, 5)
        monkeypatch.undo()
        engine.rebuild()
        assert len(engine.submit(PROMPT, 5, ignore_eos=True).result(SECONDS).token_ids) == 5


def test_progress_may_wait_for_a_task_that_reads_the_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = threading.Event()
    waits: list[bool] = []

    def report(stage: str, *_: object) -> None:
        if stage == "generate" and not waits:
            waits.append(is_read.wait(5.0))

    monkeypatch.setattr(engine, "_on_progress", report)

    async def read() -> None:
        async for _ in engine.submit(PROMPT, 4, ignore_eos=True):
            is_read.set()

    asyncio.run(read())
    assert waits == [True]


def test_answers_leave_nothing_behind_without_a_garbage_collector(engine: Engine) -> None:
    gc.collect()
    gc.disable()
    try:
        request: Any = engine._parts.requests.one("submit", PROMPT, mask=Grammar(VOCAB))[0]
        handle = weakref.ref(request)
        del request
        assert handle() is None
    finally:
        gc.enable()


def test_one_grammar_serves_many_requests(engine: Engine) -> None:
    mask = Grammar(VOCAB)
    handles = [engine.submit(PROMPT, 6, mask=mask, ignore_eos=True) for _ in range(6)]
    assert len({handle.result(SECONDS).token_ids for handle in handles}) == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": {"5": 10**400}},
        {"logit_bias": {1.7: 1}},
        {"stop_token_ids": torch.tensor(3)},
        {"deadline": 10**400},
        {"request_id": ["a"]},
        {"logit_bias": dict.fromkeys(range(5000), 1.0)},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_hostile_values_are_refused_as_settings(engine: Engine, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        engine.submit(PROMPT, 4, **asked)


def test_tokens_that_come_together_can_be_read_together(engine: Engine) -> None:
    async def lists(interval: float) -> list[list[TokenEvent]]:
        handle = engine.submit([1, 2, 3], 60, n=2, temperature=1.0, ignore_eos=True)
        return [events async for events in handle.arrivals(interval)]

    each = list(engine.submit([1, 2, 3], 60, n=2, temperature=1.0, ignore_eos=True))
    for interval in (0.0, 0.03):
        found = asyncio.run(lists(interval))
        assert [event for events in found for event in events] == each
        assert all(found)
    assert len(found) < len(each) / 2  # a step of this model takes about a millisecond
