"""What `Engine` promises: prompts in every form, why generations end, log probabilities, batches, and its errors."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import in_case
from support.tiny_models import VOCAB, TinyModel, add_tokenizer

from graphcore import Engine
from graphcore.engine.arguments import check_messages
from graphcore.errors import ConfigError, GraphcoreError, TokenizerError

Tiny = Callable[[str], TinyModel]
TEXTS = ["Hello, world", "a", "The quick brown fox jumps over the lazy dog", "1 + 1 =", "%"]
SIZES = ("batch_size=3", "prefill_chunk=16", "context_length=128")


def load(folder: Path, *overrides: str) -> Engine:
    return Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=[*SIZES, *overrides])


@pytest.fixture(scope="module")
def folder(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("with_tokenizer") / "llama3"
    shutil.copytree(tiny_model("llama3").folder, path)
    add_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return load(folder)


@pytest.fixture(scope="module")
def greedy(tiny_model: Tiny) -> Callable[[Sequence[int], int], list[int]]:
    """A function from a prompt and a number to that many likeliest tokens, each by a whole pass of transformers."""

    def choose(prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(tiny_model("llama3").logits_of(torch.tensor([ids]))[0, -1].argmax()))
        return ids[len(prompt) :]

    return choose


def with_ends(folder: Path, target: Path, ends: list[int]) -> Path:
    """Copy a checkpoint and name tokens that end a generation."""
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return target


def test_a_prompt_may_be_a_text_or_token_ids(engine: Engine, greedy: Callable[[Sequence[int], int], list[int]]) -> None:
    ids = engine.tokenizer.encode(TEXTS[0])
    expected = greedy(ids, 20)
    tensor = torch.tensor(ids)
    for prompts in (TEXTS[0], TEXTS[:1], ids, tuple(ids), [ids], [tuple(ids)], tensor, tensor[None], [tensor.numpy()]):
        (found,) = engine.generate(prompts, max_new_tokens=20)
        assert list(found.token_ids) == expected
        assert found.text == engine.tokenizer.decode(expected)
        assert found.timings.prompt_tokens == len(ids)
        assert found.timings.new_tokens == 20
    assert engine.generate([]) == []


def test_a_stream_yields_what_generate_returns(engine: Engine) -> None:
    (whole,) = engine.generate(TEXTS[0], max_new_tokens=12)
    events = list(engine.stream(TEXTS[0], max_new_tokens=12))
    assert tuple(event.token_id for event in events) == whole.token_ids
    assert "".join(event.text for event in events) == whole.text
    assert [event.finish_reason for event in events] == [None] * 11 + ["length"]
    assert {event.row for event in events} == {0}


def test_an_end_token_ends_the_generation_and_is_not_printed(
    engine: Engine, folder: Path, tmp_path: Path, greedy: Callable[[Sequence[int], int], list[int]]
) -> None:
    expected = greedy(engine.tokenizer.encode(TEXTS[0]), 24)
    at = next(place for place, token in enumerate(expected) if place > 4 and token not in expected[:place])
    with load(with_ends(folder, tmp_path / "ends", [expected[at], VOCAB - 1])) as ending:
        (found,) = ending.generate(TEXTS[0], max_new_tokens=24)
        assert found.finish_reason == "end"
        assert list(found.token_ids) == expected[: at + 1]
        assert found.text == engine.tokenizer.decode(expected[:at])
        (past,) = ending.generate(TEXTS[0], max_new_tokens=24, ignore_eos=True)
        assert (past.finish_reason, list(past.token_ids)) == ("length", expected)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_stop_string_over_several_tokens_is_never_printed(engine: Engine, width: int) -> None:
    (whole,) = engine.generate(TEXTS[0], max_new_tokens=40)
    stop = whole.text[20 : 20 + width]  # one token per character
    expected = whole.text[: whole.text.find(stop)]
    events = list(engine.stream(TEXTS[0], max_new_tokens=40, stop=[stop, "not there"]))
    assert "".join(event.text for event in events) == expected
    assert events[-1].finish_reason == "stop"
    assert len(events) == len(expected) + width
    (found,) = engine.generate(TEXTS[0], max_new_tokens=40, stop=stop)  # a text alone is one stop string
    assert (found.text, found.finish_reason) == (expected, "stop")


def test_text_that_only_began_like_a_stop_string_is_printed(engine: Engine) -> None:
    (whole,) = engine.generate(TEXTS[0], max_new_tokens=20)
    last = whole.text[-2:]
    (found,) = engine.generate(TEXTS[0], max_new_tokens=20, stop=[last + "\x00"])
    assert (found.text, found.finish_reason) == (whole.text, "length")


def test_a_full_context_ends_the_generation(
    engine: Engine, folder: Path, greedy: Callable[[Sequence[int], int], list[int]]
) -> None:
    ids = engine.tokenizer.encode(TEXTS[2])
    with load(folder, f"context_length={len(ids) + 6}") as small:
        (found,) = small.generate([ids], max_new_tokens=40)
    # Six more fit into the cache; the seventh is chosen from them and need not be stored.
    assert list(found.token_ids) == greedy(ids, 7)
    assert found.finish_reason == "context"


def test_a_request_whose_context_is_full_ends_while_its_neighbours_go_on(
    engine: Engine, greedy: Callable[[Sequence[int], int], list[int]]
) -> None:
    full, short = [7] * (engine.runner.builder.context - 2), [5, 6]
    found = engine.generate([full, short], max_new_tokens=40)
    assert [item.finish_reason for item in found] == ["context", "length"]
    assert [list(item.token_ids) for item in found] == [greedy(full, 3), greedy(short, 40)]


def test_requests_of_a_batch_end_one_by_one(
    folder: Path, tmp_path: Path, engine: Engine, greedy: Callable[[Sequence[int], int], list[int]]
) -> None:
    rows = [engine.tokenizer.encode(text) for text in TEXTS[:3]]
    full = [greedy(row, 30) for row in rows]
    ends = [full[0][6]]
    with load(with_ends(folder, tmp_path / "ends", ends)) as ending:
        together = ending.generate(rows, max_new_tokens=30)
    for item, tokens in zip(together, full, strict=True):
        stops_at = tokens.index(ends[0]) + 1 if ends[0] in tokens else 30
        assert list(item.token_ids) == tokens[:stops_at]
        assert item.finish_reason == ("end" if stops_at < 30 or tokens[-1] == ends[0] else "length")
    assert len(together[0].token_ids) <= 7


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 5, "seed": 3}, {"repetition_penalty": 1.5}])
def test_logprobs_are_those_of_the_model_before_sampling(
    engine: Engine, tiny_model: Tiny, sampling: dict[str, float]
) -> None:
    rows = [engine.tokenizer.encode(text) for text in TEXTS[:2]]
    for row, found in zip(rows, engine.generate(rows, max_new_tokens=10, logprobs=True, **sampling), strict=True):
        ids = torch.tensor([[*row, *found.token_ids]])
        expected = tiny_model("llama3").logits_of(ids)[0].log_softmax(dim=-1)[len(row) - 1 : -1]
        assert found.logprobs == pytest.approx(
            [expected[at, token].item() for at, token in enumerate(found.token_ids)], abs=2e-5
        )
    assert engine.generate(rows[:1], max_new_tokens=2)[0].logprobs is None


def test_repetition_penalty_gives_what_transformers_gives(engine: Engine, tiny_model: Tiny) -> None:
    rows = [engine.tokenizer.encode(text) for text in TEXTS[:3]]
    found = engine.generate(rows, max_new_tokens=20, repetition_penalty=1.3)
    for row, item in zip(rows, found, strict=True):
        expected = tiny_model("llama3").reference.generate(
            torch.tensor([row]), max_new_tokens=20, do_sample=False, repetition_penalty=1.3
        )
        assert list(item.token_ids) == expected[0, len(row) :].tolist()
    assert found[0].token_ids != engine.generate(rows[:1], max_new_tokens=20)[0].token_ids


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "min_p": 1},
        {"temperature": 1.0, "min_p": 1.0, "top_k": 40, "top_p": 0.9},
        {"temperature": 5.0, "top_p": 0},
        {"temperature": 1e-8},
        {"temperature": 1e-300, "top_k": 40},
        {"temperature": np.float32(0), "top_k": np.int64(-1), "top_p": 1, "min_p": None, "seed": None},
        {"temperature": 0, "top_p": 0, "top_k": 1, "min_p": 1},
        {"temperature": 0, "top_p": 0.9, "top_k": 40},
    ],
    ids=str,
)
def test_limits_of_sampling_are_greedy(
    settings: dict[str, float], penalty: float, engine: Engine, tiny_model: Tiny
) -> None:
    ids = [5, 6, 7, 8]
    expected = tiny_model("llama3").reference.generate(
        torch.tensor([ids]), max_new_tokens=8, do_sample=False, repetition_penalty=penalty
    )
    for seed in (1, 2):
        (found,) = engine.generate(
            [ids],
            max_new_tokens=8,
            repetition_penalty=penalty,
            **{"seed": seed, **settings},  # type: ignore[arg-type]
        )
        assert list(found.token_ids) == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ({"top_k": -1}, {}),
        ({"top_k": VOCAB}, {}),
        ({"top_k": 1 << 70}, {}),
        ({"top_k": 5.0}, {"top_k": 5}),
        ({"temperature": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}, {}),
        ({"seed": 7.0}, {"seed": 7}),
        ({"seed": -1}, {"seed": (1 << 64) - 1}),  # the lower 64 bits count
        ({"seed": (1 << 63) + 5}, {"seed": 5 - (1 << 63)}),
        ({"temperature": 1e300}, {"temperature": 1e20}),  # all tokens are equally likely
    ],
    ids=str,
)
def test_other_limits_of_sampling_are_off_or_the_same_number(
    settings: dict[str, float], plain: dict[str, float], engine: Engine
) -> None:
    asked = [
        engine.generate([[5, 6, 7, 8]] * 2, 8, stop=[], **{"temperature": 1.0, "seed": 3, **one})  # type: ignore[arg-type]
        for one in (settings, plain)
    ]
    assert [one.token_ids for one in asked[0]] == [one.token_ids for one in asked[1]]


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", "BF16", torch.bfloat16])
def test_a_dtype_has_the_names_that_others_have_for_it(dtype: str | torch.dtype, folder: Path) -> None:
    settings = ["context_length=16", "dtype=bfloat16", "kv_dtype=f16,torch.float32"]
    with Engine.load(folder, dtype=dtype, graph="eager", device="cpu", overrides=settings) as engine:
        assert engine.choices.dtype is torch.bfloat16
        assert tuple(engine.choices.kv_dtype) == (torch.float16, torch.float32)


def test_ids_may_be_a_list_of_tensors(engine: Engine) -> None:
    ids = [5, 6, 7]
    (expected,) = engine.generate(ids, max_new_tokens=4)
    for written in (list(torch.tensor(ids)), [torch.tensor(ids)], [list(torch.tensor(ids))], list(map(np.array, ids))):
        (found,) = engine.generate(written, max_new_tokens=4)
        assert found.token_ids == expected.token_ids
    assert torch.equal(engine.logits([list(torch.tensor(ids))]), engine.logits([ids]))


@pytest.mark.parametrize(("asked", "gets"), [(None, False), (np.bool_(True), True)])
def test_logprobs_may_be_any_truth(asked: object, gets: bool, engine: Engine) -> None:
    (found,) = engine.generate([[5]], max_new_tokens=2, logprobs=asked)  # type: ignore[arg-type]
    assert (found.logprobs is not None) == gets


def test_a_hot_draw_takes_every_token(engine: Engine) -> None:
    (found,) = engine.generate([[5]], 120, temperature=1e300, ignore_eos=True)
    assert len(set(found.token_ids)) > 50  # of 96; greedy text repeats itself within a few


@pytest.mark.parametrize("most", [-1, np.int64(-1)])
def test_no_limit_of_tokens_is_the_context(most: int, engine: Engine) -> None:
    (found,) = engine.generate([[5, 6, 7]], max_new_tokens=most, ignore_eos=True, stop=None)  # type: ignore[arg-type]
    assert (len(found.token_ids), found.finish_reason) == (128 - 3 + 1, "context")


def test_an_interrupted_request_keeps_what_there_is(engine: Engine) -> None:
    def cancel_at(count: int, ids: Sequence[int]) -> None:
        if len(ids) == count:
            handle.cancel()

    (whole,) = engine.generate(TEXTS[0], max_new_tokens=20)
    handle = engine.submit(TEXTS[0], max_new_tokens=20, mask=lambda ids: cancel_at(5, ids))
    found = handle.result()
    assert (found.finish_reason, found.token_ids) == ("interrupted", whole.token_ids[:5])
    assert engine.generate(TEXTS[0], max_new_tokens=20)[0].token_ids == whole.token_ids


WRONG_CALLS = {
    "empty text": lambda engine: engine.generate(""),
    "empty ids": lambda engine: engine.generate([[1, 2], []]),
    "no ids": lambda engine: engine.logits([]),
    "no tokens": lambda engine: engine.generate(TEXTS[0], max_new_tokens=0),
    "negative temperature": lambda engine: engine.generate(TEXTS[0], temperature=-1.0),
    "temperature is no number": lambda engine: engine.generate(TEXTS[0], temperature=float("nan")),
    "top_p below zero": lambda engine: engine.generate(TEXTS[0], temperature=1.0, top_p=-0.1),
    "min_p above one": lambda engine: engine.generate(TEXTS[0], temperature=1.0, min_p=1.1),
    "top_k below -1": lambda engine: engine.generate(TEXTS[0], temperature=1.0, top_k=-2),
    "half a top_k": lambda engine: engine.generate(TEXTS[0], temperature=1.0, top_k=1.5),
    "an endless top_k": lambda engine: engine.generate(TEXTS[0], temperature=1.0, top_k=float("inf")),
    "an endless temperature": lambda engine: engine.generate(TEXTS[0], temperature=float("inf")),
    "a text for a temperature": lambda engine: engine.generate(TEXTS[0], temperature="1"),
    "fewer than no tokens": lambda engine: engine.generate(TEXTS[0], max_new_tokens=-2),
    "half a token": lambda engine: engine.generate(TEXTS[0], max_new_tokens=0.5),
    "top_k without temperature": lambda engine: engine.generate(TEXTS[0], top_k=3),
    "penalty of zero": lambda engine: engine.generate(TEXTS[0], repetition_penalty=0.0),
    "unknown parameter": lambda engine: engine.generate(TEXTS[0], topk=3),
    "id beyond the vocabulary": lambda engine: engine.generate([[1, VOCAB]]),
    "negative id": lambda engine: engine.logits([[1, -1]]),
    "prompt beyond the context": lambda engine: engine.generate([[1] * 129]),
    "logits beyond the context": lambda engine: engine.logits([[1] * 129]),
    "empty stop string": lambda engine: engine.generate(TEXTS[0], stop=[""]),
    "rows of different lengths": lambda engine: engine.logits([[1, 2, 3], [4, 5]]),
    "one row without a batch": lambda engine: engine.logits(torch.tensor([1, 2, 3])),
    "ids beside lists of ids": lambda engine: engine.generate([1, 2, [3]]),
    "messages beside texts": lambda engine: engine.generate([{"role": "user", "content": "a"}, "b"]),
    "a message without a list": lambda engine: engine.generate({"role": "user", "content": "a"}),
    "a message without content": lambda engine: engine.generate([{"role": "user"}]),
    "a message of a number": lambda engine: engine.chat_ids([{"role": "user", "content": 3}]),
    "a message from a number": lambda engine: engine.chat_ids([{"role": 1, "content": "a"}]),
    "a stop that is a number": lambda engine: engine.generate(TEXTS[0], stop=5),
    "a stop of numbers": lambda engine: engine.stream(TEXTS[0], stop=[5]),
    "several logprobs": lambda engine: engine.generate(TEXTS[0], logprobs=5),
    "a text for logprobs": lambda engine: engine.submit(TEXTS[0], logprobs="true"),
    "half an id in a tensor": lambda engine: engine.generate([torch.tensor(5), torch.tensor(1.5)]),
    "truths for ids": lambda engine: engine.generate([True, False]),
    "a truth for a length": lambda engine: engine.generate(TEXTS[0], max_new_tokens=True),
    "a truth for a temperature": lambda engine: engine.generate(TEXTS[0], temperature=True),
    "bytes": lambda engine: engine.generate(b"abc"),
    "a warm-up beyond the batch": lambda engine: engine.warm_up(4),
    "several prompts in a stream": lambda engine: engine.stream(["a", "b"]),
    "fractions for ids": lambda engine: engine.logits(torch.tensor([[1.5, 2.0]])),
    "hidden states without a batch": lambda engine: engine.forward(torch.zeros(4, 64)),
    "hidden states of another width": lambda engine: engine.forward(torch.zeros(1, 4, 63)),
    "no hidden states": lambda engine: engine.forward(torch.zeros(1, 0, 64)),
}


def test_a_wrong_call_is_refused_in_one_line(engine: Engine) -> None:
    for wrong in WRONG_CALLS:
        with in_case(wrong):
            with pytest.raises(ConfigError) as caught:
                WRONG_CALLS[wrong](engine)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) > 20


def test_one_override_may_be_given_as_a_text(folder: Path) -> None:
    with Engine.load(folder, graph="eager", device="cpu", overrides="context_length=50") as engine:
        assert engine.choices.context_length == 50


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("prompt=hi", "overrides: prompt=hi has no effect on loading; give it to generate or stream"),
        ("repetition_detection=true", "has no effect on loading; give it to generate or stream"),
        ("task=bench", "overrides: task=bench is for the command line"),
        ("model=gemma3", "overrides: model=gemma3 has no effect on an existing source; leave it out"),
        ("model.checkpoint=x", "has no effect on an existing source"),
        ("dtype=fp32", "overrides: dtype=fp32 contradicts dtype='bf16'; leave one of them out"),
        (5, "overrides must be texts"),
    ],
)
def test_an_override_without_effect_is_refused(folder: Path, override: object, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Engine.load(folder, "bf16", graph="eager", device="cpu", overrides=[override])


def test_a_message_may_hold_a_call_of_a_tool_in_the_place_of_content() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert check_messages(messages) == messages


def test_an_empty_text_is_refused_though_its_tokenizer_adds_a_token(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bos")
    add_tokenizer(tmp_path / "bos", adds_bos=True)
    with load(tmp_path / "bos") as engine:
        assert engine.tokenizer.encode("") == [0]
        with pytest.raises(ConfigError, match="empty"):
            engine.generate("")


def test_the_last_of_many_prompts_is_checked_before_the_first_runs(engine: Engine) -> None:
    cache = engine.runner.builder.caches[0].k
    before = cache.clone()
    with pytest.raises(ConfigError, match=str(VOCAB)):
        engine.generate([[1]] * 7 + [[VOCAB]], max_new_tokens=1)
    with pytest.raises(ConfigError, match="context_length"):
        engine.generate([[1]] * 7 + [[1] * 129], max_new_tokens=1)
    assert torch.equal(cache, before)


def test_a_closed_engine_says_so(folder: Path) -> None:
    with load(folder) as engine:
        assert engine.generate("a", max_new_tokens=1)
    for call in (lambda: engine.generate("a"), lambda: engine.logits([[1]]), lambda: list(engine.stream("a"))):
        with pytest.raises(ConfigError, match="closed"):
            call()
    engine.close()


def test_a_checkpoint_without_a_tokenizer_takes_token_ids_only(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3").folder) as engine:
        assert not engine.has_tokenizer
        (found,) = engine.generate([[1, 2]], max_new_tokens=3)
        assert (found.text, len(found.token_ids)) == ("", 3)
        for call in (lambda: engine.generate("a"), lambda: engine.tokenizer, lambda: engine.chat_ids([])):
            with pytest.raises(TokenizerError, match="prompt_ids"):
                call()
        with pytest.raises(GraphcoreError, match="tokenizer"):
            engine.generate([[1]], stop=["x"])


def test_generate_reports_prompt_and_new_tokens(folder: Path) -> None:
    seen: list[tuple[str, int | None, int, int]] = []
    overrides = ["prefill_chunk=4", "batch_size=2"]
    with Engine.load(
        folder, device="cpu", graph="eager", overrides=overrides, on_progress=lambda *report: seen.append(report)
    ) as engine:
        seen.clear()
        engine.generate([[1] * 10, [2] * 3], max_new_tokens=3, ignore_eos=True)
    assert [report for report in seen if report[3] == 10] == [("prefill", None, done, 10) for done in (4, 8, 10)]
    assert ("prefill", None, 3, 3) in seen
    assert {report for report in seen if report[0] == "generate"} == {("generate", None, done, 3) for done in (1, 2, 3)}


def test_load_reports_progress_and_refuses_what_it_does_not_know(folder: Path) -> None:
    seen: list[tuple[str, int | None, int, int]] = []
    with Engine.load(
        folder, dtype="fp32", device="cpu", graph="eager", on_progress=lambda *report: seen.append(report)
    ) as engine:
        assert engine.stats["graph"] == "eager"
        assert engine.stats["dtype"] == "float32"
        assert engine.config.model_type == "llama"
        nbytes = engine.stats["weight_bytes"]
    loads = [report for report in seen if report[0] == "load"]
    assert [group for _, group, _, _ in loads] == list(range(engine.config.num_hidden_layers + 2))  # embedding, head
    assert [done for *_, done, _ in loads] == sorted({done for *_, done, _ in loads})
    assert loads[-1][2:] == (nbytes, nbytes)
    for wrong in ({"overrides": ["contextlength=3"]}, {"dtype": "fp64"}, {"device": "tpu"}, {"graph": "fast"}):
        with pytest.raises(ConfigError):
            Engine.load(folder, **{"device": "cpu", **wrong})
