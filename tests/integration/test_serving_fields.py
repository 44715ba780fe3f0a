"""Every field that docs/serving.md names does what the page says, in every endpoint that has it.

The page's tables are read: a documented field without a check here is an error, as is a field of the server's request
classes that no table names.
"""

import base64
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import httpx
import numpy as np
import pytest
from pydantic import BaseModel
from support.chat_folders import BYTE_IDS, TOKEN_IDS
from support.serving import (
    BODIES,
    CHAT,
    COMPLETIONS,
    COUNT,
    DEFAULT_BIAS,
    DETOKENIZE,
    EMBEDDINGS,
    HELLO,
    MESSAGES_PATH,
    NUM_TOKENS,
    RESPONSES,
    TOKENIZE,
    Answered,
    Ask,
    Running,
    running_server,
    save_asked_folder,
)

from graphcore import Engine
from graphcore.engine.speculation.step_costs import StepCosts
from graphcore.sampling_params import SamplingParams
from graphcore.serving.anthropic_messages import CountTokensRequest, MessagesRequest
from graphcore.serving.model_endpoints import DetokenizeRequest, TokenizeRequest
from graphcore.serving.openai_chat import ChatRequest
from graphcore.serving.openai_completions import CompletionRequest
from graphcore.serving.openai_embeddings import EmbeddingRequest
from graphcore.serving.openai_responses import ResponsesRequest

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
CLASSES: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    EMBEDDINGS: EmbeddingRequest,
    MESSAGES_PATH: MessagesRequest,
    COUNT: CountTokensRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
}
OF_CHATS = (
    *("tools", "tool_choice", "reasoning_effort", "chat_template_kwargs"),
    *("continue_final_message", "add_generation_prompt"),
)
"""Fields of /tokenize that `TokenizeRequest` leaves to `ChatRequest`."""

SAMPLED = (CHAT, COMPLETIONS, RESPONSES)
MOST_ANSWERS = 4
MOST_OF = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES_PATH: "max_tokens"}
"""Field of the most tokens of an answer."""

SIZES = ["batching.max_sequences=4", "context_length=1024"]
END, LETTER = str(TOKEN_IDS["<|im_end|>"]), str(BYTE_IDS["A"])
COLOUR = {"enum": ["red", "blue"]}
FUNCTIONS = [
    {"name": name, "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    for name in ("look", "wait")
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT_TOOLS = [{"type": "function", **function} for function in FUNCTIONS]
ANTHROPIC_TOOLS = [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS]
PAST_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RULES = "\n".join(f"r{at}: /a/" for at in range(1998))
Check = Callable[[Ask], None]
CHECKS: dict[tuple[str, str], Check] = {}
"""What shows the effect of a field, by the path and the field's name."""


@dataclass(frozen=True)
class Documented:
    """A field as a table of the page has it.

    Attributes:
        kind: "yes", "no effect", "only" or "no".
        values: for "only", the values that are taken.
    """

    kind: str
    values: tuple[Any, ...] = ()


def documented_fields() -> dict[tuple[str, str], Documented]:
    """Return the fields of the page's tables, by path and name; a heading says which paths its table is for."""
    section = PAGE.read_text("utf-8").partition("\n## Fields\n")[2].partition("\n## ")[0]
    found: dict[tuple[str, str], Documented] = {}
    for heading, text in re.findall(r"^### (.*)\n((?:(?!^###).*\n)*)", section, re.MULTILINE):
        paths = list(CLASSES) if heading == "Every endpoint" else re.findall(r"/[\w/]+", heading)
        rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
        assert rows, f"{heading} has no table"
        assert set(paths) <= set(CLASSES), heading
        for names, taken, _ in rows:
            kind = taken.split("`")[0].strip()
            values = tuple(json.loads(value) for value in re.findall(r"`(.*?)`", taken))
            assert kind in ("yes", "no effect", "no") or (kind == "only" and values), (names, taken)
            for key in [(path, name) for path in paths for name in re.findall(r"`(.*?)`", names)]:
                assert key not in found, f"{key} is in two tables"
                found[key] = Documented(kind, values)
    return found


FIELDS = documented_fields()


def fields_of_kind(kind: str) -> list[Any]:
    """Return the parameters of a test of all fields of a kind."""
    return [pytest.param(*key, id=f"{key[0]}-{key[1]}") for key, one in FIELDS.items() if one.kind == kind]


def names_of(model: type[BaseModel]) -> set[str]:
    """Return the names of a class's fields, with those of objects inside, such as "text.format"."""
    names = set[str]()
    for name, field in model.model_fields.items():
        kinds = get_args(field.annotation) if get_origin(field.annotation) is UnionType else (field.annotation,)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        names |= {f"{name}.{one}" for kind in inner for one in names_of(kind)} or {name}
    return names


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server; a request without a seed has the same one each time."""
    folder = save_asked_folder(tmp_path_factory.mktemp("fields") / "model")
    sampling = SamplingParams(logit_bias=tuple(DEFAULT_BIAS.items()))
    with (
        pytest.MonkeyPatch.context() as patch,
        Engine.load(folder, dtype="fp32", device="cpu", overrides=[*SIZES, "speculation=lookup"]) as engine,
        running_server(
            lambda: engine, sampling=sampling, exact=True, stream_interval=0, max_answers=MOST_ANSWERS
        ) as running,
    ):
        patch.setattr(secrets, "randbelow", lambda _: 58)
        patch.setattr(StepCosts, "record", lambda *_: None)  # whether drafts pay is not the clock's business here
        yield running


@pytest.fixture(scope="module")
def http(running: Running) -> Iterator[httpx.Client]:
    with running.client() as http:
        yield http


@pytest.fixture
def ask(http: httpx.Client, path: str) -> Ask:
    return Ask(http, path)


def effect(name: str, *paths: str) -> Callable[[Check], Check]:
    """Register what shows the effect of a field in some endpoints."""

    def registered(check: Check) -> Check:
        for path in paths:
            assert (path, name) not in CHECKS, f"{name} has two checks"
            CHECKS[path, name] = check
        return check

    return registered


# Fields of several endpoints


@effect("model", *CLASSES)
def model_is_any_name(ask: Ask) -> None:
    named = ask(model="gpt-x")
    assert named.content == ask().content
    assert "model" not in named.body or named.body["model"] == "tiny"


@effect("temperature", *SAMPLED, MESSAGES_PATH)
def temperature_zero_is_greedy(ask: Ask) -> None:
    seeds = ({"seed": 8}, {"seed": 9}) if ask.path != MESSAGES_PATH else ({}, {})
    greedy = [ask(temperature=0, **seed).text for seed in seeds]
    assert greedy[0] == greedy[1] != ask().text == ask(temperature=1).text


def check_greedy(ask: Ask, **fields: Any) -> None:
    """Check that fields make an answer greedy that is not without them."""
    assert ask(**fields).text == ask(temperature=0).text != ask().text


@effect("top_p", *SAMPLED, MESSAGES_PATH)
def top_p_of_zero_keeps_one_token(ask: Ask) -> None:
    check_greedy(ask, top_p=0)
    assert ask(top_p=1).text == ask().text


@effect("min_p", *SAMPLED)
def min_p_of_one_keeps_one_token(ask: Ask) -> None:
    check_greedy(ask, min_p=1)


@effect("top_k", *SAMPLED, MESSAGES_PATH)
def top_k_of_one_is_greedy(ask: Ask) -> None:
    check_greedy(ask, top_k=1)
    assert ask(top_k=0).text == ask().text
    if ask.path != MESSAGES_PATH:
        assert ask(top_k=-1).text == ask().text


@effect("repetition_penalty", *SAMPLED)
def repetition_penalty_keeps_a_token_from_coming_again(ask: Ask) -> None:
    wanted = {"logit_bias": {LETTER: 30}, "temperature": 0}
    assert ask(**wanted).text == "A" * NUM_TOKENS
    found = ask(**wanted, repetition_penalty=100).text
    assert (found[0], found.count("A")) == ("A", 1)


def most_of_one(text: str) -> int:
    """Return how often the most frequent character comes."""
    return max(Counter(text).values())


@effect("presence_penalty", *SAMPLED)
def a_presence_penalty_changes_how_often_a_token_comes(ask: Ask) -> None:
    check_penalty(ask, "presence_penalty")


@effect("frequency_penalty", *SAMPLED)
def a_frequency_penalty_changes_how_often_a_token_comes(ask: Ask) -> None:
    check_penalty(ask, "frequency_penalty")


def check_penalty(ask: Ask, name: str) -> None:
    """Check that the most frequent character of an answer is rarer with a penalty, and more frequent with a reward."""
    counts = [most_of_one(ask(temperature=0, **{name: value, MOST_OF[ask.path]: 40}).text) for value in (2, 0, -2)]
    assert counts[0] < counts[1] < counts[2]


def longest_of_one(ask: Ask, **fields: Any) -> int:
    """Return the most times in a row that "A" comes in an answer that prefers it by far."""
    wanted = {"logit_bias": {LETTER: 30}, "temperature": 0, MOST_OF[ask.path]: 40, **fields}
    return max(map(len, re.findall("A+", ask(**wanted).text)))


@effect("dry_multiplier", *SAMPLED)
def dry_ends_a_repetition(ask: Ask) -> None:
    assert longest_of_one(ask, dry_multiplier=0) == 40
    assert longest_of_one(ask, dry_multiplier=1000) == 3  # the third A repeats one token, the fourth would repeat two


@effect("dry_base", *SAMPLED)
def dry_s_penalty_grows_with_the_repetition(ask: Ask) -> None:
    assert longest_of_one(ask, dry_multiplier=1, dry_base=0.9) == 40  # off
    found = [longest_of_one(ask, dry_multiplier=1, dry_base=base) for base in (1, 1.75, 4)]
    assert found[0] == 40 > found[1] > found[2]


@effect("dry_allowed_length", *SAMPLED)
def a_repetition_of_the_allowed_length_is_not_penalised(ask: Ask) -> None:
    for allowed in (1, 2, 6):
        assert longest_of_one(ask, dry_multiplier=1000, dry_allowed_length=allowed) == allowed + 1


@effect("dry_penalty_last_n", *SAMPLED)
def dry_looks_at_the_last_tokens(ask: Ask) -> None:
    assert longest_of_one(ask, dry_multiplier=1000, dry_penalty_last_n=0) == 40
    assert longest_of_one(ask, dry_multiplier=1000, dry_penalty_last_n=2) == 40
    assert longest_of_one(ask, dry_multiplier=1000, dry_penalty_last_n=3) == 3


@effect("dry_sequence_breakers", *SAMPLED)
def no_repetition_contains_a_sequence_breaker(ask: Ask) -> None:
    assert longest_of_one(ask, dry_multiplier=1000, dry_sequence_breakers=["\n"]) == 3
    assert longest_of_one(ask, dry_multiplier=1000, dry_sequence_breakers=["\n", "A"]) == 40
    assert ask.refused(dry_multiplier=1, dry_sequence_breakers=["of no token"]) == "dry_sequence_breakers"


@effect("top_n_sigma", *SAMPLED)
def few_deviations_keep_one_token(ask: Ask) -> None:
    check_greedy(ask, top_n_sigma=1e-6)
    assert ask(top_n_sigma=-1).text == ask(top_n_sigma=0).text == ask().text


@effect("xtc_probability", *SAMPLED)
def xtc_drops_the_likeliest_token(ask: Ask) -> None:
    wanted = {"logit_bias": {LETTER: 30}, "xtc_threshold": 0}
    assert ask(**wanted).text == ask(**wanted, xtc_probability=0).text == "A" * NUM_TOKENS
    assert "A" not in ask(**wanted, xtc_probability=1).text


@effect("xtc_threshold", *SAMPLED)
def xtc_drops_only_tokens_above_the_threshold(ask: Ask) -> None:
    wanted = {"logit_bias": {LETTER: 30}, "xtc_probability": 1}
    assert ask(**wanted, xtc_threshold=0.6).text == "A" * NUM_TOKENS
    assert "A" not in ask(**wanted, xtc_threshold=0).text


@effect("logit_bias", *SAMPLED)
def logit_bias_forces_a_token(ask: Ask) -> None:
    assert ask(logit_bias={LETTER: 100}).text == "A" * NUM_TOKENS


@effect("min_tokens", *SAMPLED)
def nothing_ends_an_answer_before_min_tokens(ask: Ask) -> None:
    ended = ask(logit_bias={END: 100})
    later = ask(logit_bias={END: 100}, min_tokens=5)
    assert (ended.reason, later.reason, later.new_tokens - ended.new_tokens) == ("stop", "stop", 5)


@effect("stop_token_ids", *SAMPLED)
def a_stop_token_ends_the_answer(ask: Ask) -> None:
    free = ask().text
    found = ask(stop_token_ids=[BYTE_IDS[free[5]]])
    assert (found.text, found.reason) == (free[: free.index(free[5])], "stop")


@effect("ignore_eos", *SAMPLED)
def end_tokens_are_ignored_if_asked(ask: Ask) -> None:
    found = ask(logit_bias={END: 100}, ignore_eos=True)
    assert (found.new_tokens, found.reason) == (NUM_TOKENS, "length")


@effect("repetition_detection", *SAMPLED)
def an_answer_that_repeats_itself_ends_if_asked(ask: Ask) -> None:
    endless = {"logit_bias": {LETTER: 100}, MOST_OF[ask.path]: 400}
    assert ask(**endless).new_tokens == 400
    found = ask(**endless, repetition_detection=True)
    assert 200 < found.new_tokens < 220
    assert found.text == "A" * found.new_tokens
    assert found.reason == ("length" if ask.path == RESPONSES else "repetition")


def drafted(http: httpx.Client) -> float:
    """Return the number of draft tokens that the server has checked so far."""
    found = re.search(r"^graphcore_draft_tokens_total (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@effect("speculation", *SAMPLED)
def no_draft_tokens_are_checked_if_asked(ask: Ask) -> None:
    repeated = {"logit_bias": {LETTER: 100}}
    before = drafted(ask.http)
    assert ask(speculation="off", **repeated).text == "A" * NUM_TOKENS
    assert drafted(ask.http) == before
    assert ask(**repeated).text == "A" * NUM_TOKENS
    assert drafted(ask.http) > before
    assert ask.refused(speculation="self") == "speculation"


@effect("seed", *SAMPLED)
def a_seed_repeats_an_answer(ask: Ask) -> None:
    assert ask(seed=5).text == ask(seed=5).text != ask(seed=6).text
    assert ask(seed=-1).text == ask(seed=2**64 - 1).text


WITHOUT_THOUGHTS: dict[str, dict[str, Any]] = {
    CHAT: {"chat_template_kwargs": {"enable_thinking": False}},
    RESPONSES: {"reasoning": {"effort": "none"}},
    MESSAGES_PATH: {"thinking": {"type": "disabled"}},
}


def without_thoughts(ask: Ask, **fields: Any) -> Answered:
    """Return an answer without thoughts, which no grammar binds."""
    return ask(**fields, **WITHOUT_THOUGHTS.get(ask.path, {}))


def check_bound(ask: Ask, pattern: str, **fields: Any) -> None:
    """Check that fields bind the whole answer, which is another without them."""
    found = without_thoughts(ask, **fields)
    assert re.fullmatch(pattern, found.text), (fields, found.text)
    assert found.reason in ("stop", "end_turn")
    assert not re.fullmatch(pattern, ask().text)


@effect("regex", *SAMPLED)
def a_regex_binds_the_answer(ask: Ask) -> None:
    check_bound(ask, "[ab]{3}c", regex="[ab]{3}c")
    assert ask.refused(regex="[ab]{3}c", choice=["a"]) == "choice"


@effect("guided_regex", *SAMPLED)
def a_guided_regex_binds_the_answer(ask: Ask) -> None:
    check_bound(ask, "[ab]{3}c", guided_regex="[ab]{3}c")


@effect("choice", *SAMPLED)
def a_choice_binds_the_answer(ask: Ask) -> None:
    check_bound(ask, "red|blue", choice=["red", "blue"])


@effect("guided_choice", *SAMPLED)
def a_guided_choice_binds_the_answer(ask: Ask) -> None:
    check_bound(ask, "red|blue", guided_choice=["red", "blue"])


@effect("grammar", *SAMPLED)
def grammars_of_both_forms_bind_the_answer(ask: Ask) -> None:
    check_bound(ask, "[ab]{2}c", grammar="start: /[ab]{2}c/")
    check_bound(ask, "[ab]{2}c", grammar='root ::= [ab] [ab] "c"')
    assert ask.send({"grammar": "start: nothing", "stream": True}).status_code == 400


@effect("guided_grammar", *SAMPLED)
def guided_grammars_of_both_forms_bind_the_answer(ask: Ask) -> None:
    check_bound(ask, "[ab]{2}c", guided_grammar="start: /[ab]{2}c/")
    check_bound(ask, "[ab]{2}c", guided_grammar='root ::= [ab] [ab] "c"')


@effect("guided_json", *SAMPLED)
def a_guided_schema_binds_the_answer(ask: Ask) -> None:
    check_bound(ask, '"(red|blue)"', guided_json=COLOUR)
    check_bound(ask, '"(red|blue)"', guided_json=json.dumps(COLOUR))


@effect("structured_outputs", *SAMPLED)
def structured_outputs_of_each_form_bind_the_answer(ask: Ask) -> None:
    check_bound(ask, "[ab]{3}c", structured_outputs={"regex": "[ab]{3}c"})
    check_bound(ask, "red|blue", structured_outputs={"choice": ["red", "blue"]})
    check_bound(ask, '"(red|blue)"', structured_outputs={"json": COLOUR})
    check_bound(ask, "[ab]{2}c", structured_outputs={"grammar": "start: /[ab]{2}c/"})
    assert without_thoughts(ask, structured_outputs={"json_object": True}).text[0] == "{" != ask().text[0]
    assert ask.refused(structured_outputs={"xml": True}) == "structured_outputs"


def tokens_with_logprobs(ask: Ask, found: Answered) -> list[Any]:
    """Return the log probabilities of an answer's tokens: entries of chats, or texts of completions."""
    if ask.path == COMPLETIONS:
        return list(found.body["choices"][0]["logprobs"]["tokens"])
    if ask.path == CHAT:
        return list(found.body["choices"][0]["logprobs"]["content"])
    return list(found.body["output"][0]["content"][0]["logprobs"])


ASKED_LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True},
    COMPLETIONS: {"logprobs": 0},
    RESPONSES: {"include": ["message.output_text.logprobs"]},
}


@effect("return_tokens_as_token_ids", *SAMPLED)
def tokens_are_shown_as_ids_if_asked(ask: Ask) -> None:
    biased = {**ASKED_LOGPROBS[ask.path], "logit_bias": {LETTER: 100}}
    found = tokens_with_logprobs(ask, ask(**biased, return_tokens_as_token_ids=True))
    shown = [one if isinstance(one, str) else one["token"] for one in found]
    assert shown == [f"token_id:{LETTER}"] * NUM_TOKENS


def streamed_text(events: list[Any]) -> str:
    """Return the text of a stream of any interface."""
    found = ""
    for event in events:
        for choice in event.get("choices", ()):
            found += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if event.get("type") == "response.output_text.delta":
            found += event["delta"]
        if event.get("type") == "content_block_delta":
            found += event["delta"].get("text", "")
    return found


@effect("stream", *SAMPLED, MESSAGES_PATH)
def a_stream_has_the_text_in_pieces(ask: Ask) -> None:
    most = {MOST_OF[ask.path]: 100}
    expected = ask(**most).text
    for _ in range(10):  # a busy machine may have all of a short text when it sends the first piece
        pieces = [piece for event in ask.events(**most) if (piece := streamed_text([event]))]
        assert "".join(pieces) == expected
        if len(pieces) > 1:
            return
    pytest.fail("all streams were sent in one piece")


@effect("stream_options.include_usage", CHAT, COMPLETIONS)
def a_stream_ends_with_the_numbers_of_tokens_if_asked(ask: Ask) -> None:
    last = ask.events(stream_options={"include_usage": True})[-1]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], NUM_TOKENS)
    assert not any(event.get("usage") for event in ask.events())


@effect("n", CHAT, COMPLETIONS)
def several_answers_are_given(ask: Ask) -> None:
    found = ask(n=3)
    assert len(set(found.texts)) == 3
    assert found.text == ask().text
    assert found.new_tokens == 3 * NUM_TOKENS


@effect("stop", CHAT, COMPLETIONS)
def a_stop_text_cuts_the_answer(ask: Ask) -> None:
    check_stop(ask, "stop")
    free = ask().text
    assert ask(stop=free[4:6]).text == free[: free.index(free[4:6])]


def check_stop(ask: Ask, field: str) -> None:
    """Check that texts end an answer, which has none of them."""
    free = ask().text
    found = ask(**{field: ["not there", free[4:6]]})
    assert found.text == free[: free.index(free[4:6])]
    assert found.reason in ("stop", "stop_sequence")
    assert ask.refused(**{field: [""]}) == field


@effect("response_format", CHAT, COMPLETIONS)
def a_response_format_binds_the_answer(ask: Ask) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    check_bound(ask, '"(red|blue)"', response_format=named)
    check_json_object(ask, lambda form: {"response_format": form})
    assert ask.refused(response_format={"type": "xml"}) == "response_format"


def check_json_object(ask: Ask, fields: Callable[[Any], dict[str, Any]]) -> None:
    """Check that json_object makes an object of the answer, and that text makes nothing of it."""
    assert without_thoughts(ask, **fields({"type": "json_object"})).text[0] == "{" != ask().text[0]
    assert ask(**fields({"type": "text"})).text == ask().text


# Fields of prompts


def shown(ask: Ask, **fields: Any) -> str:
    """Return the prompt of a chat, as /tokenize and /detokenize show it."""
    tokens = Ask(ask.http, TOKENIZE)(prompt=..., **{"messages": HELLO, **fields}).body["tokens"]
    return str(Ask(ask.http, DETOKENIZE)(tokens=tokens).body["prompt"])


def num_prompt_tokens(ask: Ask, **fields: Any) -> int:
    """Return the number of a prompt's tokens, as the endpoint tells it."""
    found = ask(**fields)
    if ask.path == COUNT:
        return int(found.body["input_tokens"])
    return int(found.body["count"]) if ask.path == TOKENIZE else found.prompt_tokens


def extra_tokens(ask: Ask, **fields: Any) -> int:
    """Return how many tokens fields add to a prompt; the prompt of a chat, in /tokenize."""
    plain: dict[str, Any] = {"prompt": ..., "messages": HELLO} if ask.path == TOKENIZE else {}
    return num_prompt_tokens(ask, **{**plain, **fields}) - num_prompt_tokens(ask, **plain)


@effect("messages", CHAT, MESSAGES_PATH, COUNT, TOKENIZE)
def messages_are_the_prompt(ask: Ask) -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    system: list[Any] = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert extra_tokens(ask, messages=[{"role": "user", "content": "Hi you"}]) == 4
    assert extra_tokens(ask, messages=[{"role": "user", "content": parts}]) >= 6
    assert extra_tokens(ask, messages=system) == len("system\nBe brief.\n") + 2
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    plain: dict[str, Any] = {"prompt": ...} if ask.path == TOKENIZE else {}
    assert ask.refused(**plain, messages=image) == "messages[0].content[0]"
    if ask.path in (CHAT, TOKENIZE):
        turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [PAST_CALL]}]
        turns = [{"role": "developer", "content": "x"}, *turns, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
        assert "<tool_response>\nok\n" in shown(ask, messages=turns)


@effect("max_tokens", CHAT, MESSAGES_PATH)
@effect("max_completion_tokens", CHAT)
@effect("max_output_tokens", RESPONSES)
def answers_have_at_most_so_many_tokens(ask: Ask) -> None:
    name = MOST_OF[ask.path]
    for count in (1, 5):
        found = ask(**{name: count})
        assert (found.new_tokens, found.reason) == (count, "max_tokens" if ask.path == MESSAGES_PATH else "length")
    assert ask.refused(**{name: 0}) == name
    if ask.path == CHAT:
        assert ask(max_tokens=..., max_completion_tokens=4).new_tokens == 4
        assert ask(max_tokens=9, max_completion_tokens=3).new_tokens == 3


@effect("logprobs", CHAT)
def chats_have_log_probabilities_if_asked(ask: Ask) -> None:
    found = ask(logprobs=True)
    tokens = tokens_with_logprobs(ask, found)
    assert "".join(one["token"] for one in tokens) == found.text
    assert len(tokens) == NUM_TOKENS
    assert not any(one["top_logprobs"] for one in tokens)
    assert ask(logprobs=False).body["choices"][0]["logprobs"] is None


@effect("top_logprobs", CHAT, RESPONSES)
def as_many_of_the_likeliest_tokens_as_asked_are_given(ask: Ask) -> None:
    more = {"logprobs": True} if ask.path == CHAT else {}
    tokens = tokens_with_logprobs(ask, ask(top_logprobs=3, **more))
    assert [len(one["top_logprobs"]) for one in tokens] == [3] * NUM_TOKENS
    assert len(tokens_with_logprobs(ask, ask(top_logprobs=20, **more))[0]["top_logprobs"]) == 20
    if ask.path == CHAT:
        assert ask.refused(top_logprobs=3) == "top_logprobs"


# Tools


TOOLS_OF: dict[str, list[Any]] = {
    CHAT: TOOLS,
    RESPONSES: FLAT_TOOLS,
    MESSAGES_PATH: ANTHROPIC_TOOLS,
    COUNT: ANTHROPIC_TOOLS,
    TOKENIZE: TOOLS,
}
LONG: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": 150, "reasoning_effort": "none"},
    RESPONSES: {"max_output_tokens": 150, "reasoning": {"effort": "none"}},
    MESSAGES_PATH: {"max_tokens": 150, "thinking": {"type": "disabled"}},
}
"""Fields with which an answer has room for calls, and no thoughts before them."""


@effect("tools", *TOOLS_OF)
def tools_are_in_the_prompt(ask: Ask) -> None:
    one = extra_tokens(ask, tools=TOOLS_OF[ask.path][:1])
    both = extra_tokens(ask, tools=TOOLS_OF[ask.path])
    assert 0 < one < both
    assert extra_tokens(ask, tools=[]) == 0
    if ask.path == RESPONSES:
        found = ask(tools=[{"type": "web_search"}, *FLAT_TOOLS])
        assert (found.ignored, len(found.body["tools"])) == (("tools.web_search",), 2)
    if ask.path == CHAT:
        assert ask.refused(tools=[{"type": "custom", "custom": {"name": "x"}}]) == "tools.0.type"
    if ask.path in (MESSAGES_PATH, COUNT):
        assert ask.refused(tools=[{"type": "web_search_20250305", "name": "web_search"}]).startswith("tools.0")


@effect("tool_choice", CHAT, RESPONSES, TOKENIZE)
def a_tool_choice_makes_the_model_call(ask: Ask) -> None:
    tools = TOOLS_OF[ask.path]
    if ask.path == TOKENIZE:
        assert extra_tokens(ask, tools=tools, tool_choice="none") == 0 < extra_tokens(ask, tools=tools)
        return
    named: dict[str, Any] = {"type": "function", "name": "wait"}
    named = named if ask.path == RESPONSES else {"type": "function", "function": named}
    check_choices(ask, {"none": "none", "auto": "auto", "any": "required", "wait": named})
    assert ask.refused(tools=tools, tool_choice="maybe") == "tool_choice"
    assert ask.refused(tool_choice="required") == "tool_choice"
    if ask.path == RESPONSES:
        some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "wait"}]}
        assert {name for name, _ in ask(tools=tools, tool_choice=some, **LONG[ask.path]).calls} == {"wait"}
        assert ask.refused(tools=[*tools, {"type": "x"}], tool_choice={"type": "x"}) == "tool_choice"


def check_choices(ask: Ask, choices: Mapping[str, Any]) -> None:
    """Check the forms of a tool_choice: none, auto, any and that of the function wait."""
    tools = TOOLS_OF[ask.path]
    assert extra_tokens(ask, tools=tools, tool_choice=choices["none"]) == 0
    assert extra_tokens(ask, tools=tools, tool_choice=choices["auto"]) == extra_tokens(ask, tools=tools) > 0
    assert not ask(tools=tools, tool_choice=choices["auto"]).calls
    called = ask(tools=tools, tool_choice=choices["any"], **LONG[ask.path]).calls
    assert called
    assert {name for name, _ in called} <= {"look", "wait"}
    assert {json.loads(arguments) == {} for _, arguments in called} == {True}
    assert {name for name, _ in ask(tools=tools, tool_choice=choices["wait"], **LONG[ask.path]).calls} == {"wait"}


@effect("parallel_tool_calls", CHAT, RESPONSES)
def one_answer_has_one_call_if_asked(ask: Ask) -> None:
    asked = {"tools": TOOLS_OF[ask.path], "tool_choice": "required", **LONG[ask.path]}
    assert len(ask(**asked).calls) > 1
    assert len(ask(**asked, parallel_tool_calls=False).calls) == 1


@effect("tool_choice.type", MESSAGES_PATH, COUNT)
@effect("tool_choice.name", MESSAGES_PATH, COUNT)
def a_tool_choice_of_messages_makes_the_model_call(ask: Ask) -> None:
    kinds: dict[str, Any] = {kind: {"type": kind} for kind in ("none", "auto", "any")}
    if ask.path == MESSAGES_PATH:
        check_choices(ask, {**kinds, "wait": {"type": "tool", "name": "wait"}})
    assert extra_tokens(ask, tools=ANTHROPIC_TOOLS, tool_choice=kinds["none"]) == 0
    assert ask.refused(tools=ANTHROPIC_TOOLS, tool_choice={"type": "tool", "name": "x"}) == "tool_choice.name"
    assert ask.refused(tools=ANTHROPIC_TOOLS, tool_choice={"type": "maybe"}) == "tool_choice.type"


@effect("tool_choice.disable_parallel_tool_use", MESSAGES_PATH, COUNT)
def one_message_has_one_use_if_asked(ask: Ask) -> None:
    one: dict[str, Any] = {"type": "any", "disable_parallel_tool_use": True}
    if ask.path == COUNT:
        assert extra_tokens(ask, tools=ANTHROPIC_TOOLS, tool_choice=one) == extra_tokens(ask, tools=ANTHROPIC_TOOLS)
        return
    asked = {"tools": ANTHROPIC_TOOLS, **LONG[ask.path]}
    assert len(ask(**asked, tool_choice={"type": "any"}).calls) > 1
    assert len(ask(**asked, tool_choice=one).calls) == 1


# Thinking


EFFORT = len("system\nEffort: high\n") + 2  # tokens of the template's turn about an effort
OPEN, CLOSED = 1, 5  # tokens of a template's open and closed thoughts: tags and line breaks


@effect("reasoning_effort", CHAT, TOKENIZE)
@effect("reasoning.effort", RESPONSES)
def an_effort_is_a_variable_of_the_template(ask: Ask) -> None:
    def fields(effort: str) -> dict[str, Any]:
        return {"reasoning": {"effort": effort}} if ask.path == RESPONSES else {"reasoning_effort": effort}

    assert extra_tokens(ask, **fields("high")) == EFFORT + OPEN
    assert extra_tokens(ask, **fields("none")) == EFFORT + CLOSED
    if ask.path != TOKENIZE:
        found = ask(**fields("high"))
        assert (len(found.thoughts), found.text) == (NUM_TOKENS, "")
        assert (ask(**fields("minimal")).thoughts, len(ask(**fields("minimal")).text)) == ("", NUM_TOKENS)


@effect("chat_template_kwargs", CHAT, TOKENIZE)
def variables_of_the_template_can_be_set(ask: Ask) -> None:
    assert extra_tokens(ask, chat_template_kwargs={"reasoning_effort": "high"}) == EFFORT
    assert extra_tokens(ask, chat_template_kwargs={"enable_thinking": True}) == OPEN
    plain: dict[str, Any] = {"prompt": ..., "messages": HELLO} if ask.path == TOKENIZE else {}
    refused = ask.refused(**plain, chat_template_kwargs={"chat_template": "x"})
    assert refused == "chat_template_kwargs"


@effect("continue_final_message", CHAT, TOKENIZE)
@effect("add_generation_prompt", CHAT, TOKENIZE)
def the_last_message_is_continued_if_asked(ask: Ask) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    new = extra_tokens(ask, messages=begun)
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert extra_tokens(ask, messages=begun, **more) == new - len("\nassistant\n") - 2
    assert shown(ask, messages=begun, **more).endswith("assistant\nWell")
    plain: dict[str, Any] = {"prompt": ...} if ask.path == TOKENIZE else {}
    assert ask.refused(**plain, messages=begun, add_generation_prompt=False) == "add_generation_prompt"


# Completions


@effect("prompt", COMPLETIONS)
def prompts_are_texts_or_token_ids_one_or_several(ask: Ask) -> None:
    ids = Ask(ask.http, TOKENIZE)(prompt="Hi").body["tokens"]
    assert ask(prompt=ids).text == ask().text != ask(prompt="Ho").text
    pair = ask(prompt=["Hi", "Ho"]).texts
    assert pair == ask(prompt=[ids, [*ids[:-1], BYTE_IDS["o"]]]).texts
    assert pair == (ask().text, ask(prompt="Ho", seed=2).text)
    assert ask.refused(prompt="") == "prompt"


@effect("max_tokens", COMPLETIONS)
def completions_have_sixteen_tokens_unless_asked(ask: Ask) -> None:
    assert (ask(max_tokens=...).new_tokens, ask(max_tokens=3).new_tokens) == (16, 3)
    scored = ask(max_tokens=0, echo=True, logprobs=1)
    assert (scored.new_tokens, scored.text.endswith("Hi")) == (0, True)
    assert ask.refused(max_tokens=0) == "max_tokens"


@effect("echo", COMPLETIONS)
def an_echo_begins_with_the_prompt(ask: Ask) -> None:
    assert ask(echo=True).text == "Hi" + ask().text
    assert ask.refused(echo=True, logprobs=1, stream=True) == "stream"


@effect("logprobs", COMPLETIONS)
def completions_have_log_probabilities_if_asked(ask: Ask) -> None:
    found = ask(logprobs=2).body["choices"][0]["logprobs"]
    lists = [found[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    assert [len(one) for one in lists] == [NUM_TOKENS] * 4
    ids = ask(logprobs=2, return_tokens_as_token_ids=True).body["choices"][0]["logprobs"]["top_logprobs"]
    assert {len(one) for one in ids} == {2}
    assert [max(one.values()) for one in found["top_logprobs"]] == [max(one.values()) for one in ids]
    assert ask(logprobs=0).body["choices"][0]["logprobs"]["top_logprobs"] is None
    assert ask().body["choices"][0]["logprobs"] is None


@effect("add_special_tokens", COMPLETIONS, TOKENIZE)
def texts_can_be_without_the_tokens_that_begin_them(ask: Ask) -> None:
    assert num_prompt_tokens(ask) == 3
    assert num_prompt_tokens(ask, add_special_tokens=False) == 2
    if ask.path == TOKENIZE:
        assert extra_tokens(ask, add_special_tokens=False) == 0


# Responses


@effect("input", RESPONSES)
def an_input_is_a_text_or_items(ask: Ask) -> None:
    assert ask(input=HELLO).content == ask().content
    past = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [PAST_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    assert ask(input=[*HELLO, *past]).prompt_tokens == len(
        Ask(ask.http, TOKENIZE)(prompt=..., messages=turns).body["tokens"]
    )
    assert ask.refused(input=[{"type": "item_reference", "id": "x"}]) == "input[0].type"


@effect("instructions", RESPONSES)
@effect("system", MESSAGES_PATH, COUNT)
def instructions_are_a_system_message(ask: Ask) -> None:
    name = "instructions" if ask.path == RESPONSES else "system"
    assert extra_tokens(ask, **{name: "Be brief."}) == len("system\nBe brief.\n") + 2
    if name == "system":
        assert extra_tokens(ask, system=[{"type": "text", "text": "Be"}]) == len("system\nBe\n") + 2
        assert ask.refused(system=[{"type": "image"}]) == "system[0]"


@effect("include", RESPONSES)
def log_probabilities_are_included_if_asked(ask: Ask) -> None:
    found = ask(include=["message.output_text.logprobs", "reasoning.encrypted_content"])
    assert len(tokens_with_logprobs(ask, found)) == NUM_TOKENS
    assert found.ignored == ("include.reasoning.encrypted_content",)
    assert tokens_with_logprobs(ask, ask()) == []


@effect("text.format", RESPONSES)
def a_text_format_binds_the_answer(ask: Ask) -> None:
    check_bound(ask, '"(red|blue)"', text={"format": {"type": "json_schema", "name": "colour", "schema": COLOUR}})
    check_json_object(ask, lambda form: {"text": {"format": form}})
    assert ask.refused(text={"format": {"type": "xml"}}) == "text.format"


@effect("reasoning.summary", RESPONSES)
@effect("reasoning.generate_summary", RESPONSES)
def thoughts_come_as_the_summary_if_asked(ask: Ask) -> None:
    whole = ask(reasoning={"effort": "high"})
    for name in ("summary", "generate_summary"):
        (item,) = ask(reasoning={"effort": "high", name: "auto"}).body["output"][:1]
        assert (item["type"], item["summary"][0]["text"]) == ("reasoning", whole.thoughts)
    assert whole.body["output"][0]["summary"] == []


@effect("metadata", RESPONSES)
def metadata_come_back(ask: Ask) -> None:
    assert ask(metadata={"a": "b"}).body["metadata"] == {"a": "b"}


# Embeddings


def vector(found: Answered) -> Any:
    return np.array(found.body["data"][0]["embedding"])


@effect("input", EMBEDDINGS)
def inputs_are_texts_or_token_ids_one_or_several(ask: Ask) -> None:
    ids = Ask(ask.http, TOKENIZE)(prompt="Hi there").body["tokens"]
    assert vector(ask(input=ids)) == pytest.approx(vector(ask()))
    assert len(ask(input=["Hi", "Ho"]).body["data"]) == len(ask(input=[ids, ids]).body["data"]) == 2
    assert ask.refused(input="") == "input"


@effect("encoding_format", EMBEDDINGS)
def embeddings_are_numbers_or_base64(ask: Ask) -> None:
    text = ask(encoding_format="base64").body["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4") == pytest.approx(vector(ask()))
    assert vector(ask(encoding_format="float")) == pytest.approx(vector(ask()))
    assert ask.refused(encoding_format="int8") == "encoding_format"


@effect("dimensions", EMBEDDINGS)
def dimensions_are_the_models_own(ask: Ask) -> None:
    size = len(vector(ask()))
    assert len(vector(ask(dimensions=size))) == size
    assert ask.refused(dimensions=size - 1) == "dimensions"


@effect("pooling", EMBEDDINGS)
def embeddings_are_of_all_tokens_or_of_the_last(ask: Ask) -> None:
    assert vector(ask(pooling="mean")) == pytest.approx(vector(ask()))
    assert vector(ask(pooling="last")) != pytest.approx(vector(ask()))


@effect("normalize", EMBEDDINGS)
def embeddings_have_length_one_unless_asked(ask: Ask) -> None:
    raw = vector(ask(normalize=False))
    assert np.linalg.norm(vector(ask(normalize=True))) == pytest.approx(1)
    assert np.linalg.norm(raw) != pytest.approx(1)
    assert raw / np.linalg.norm(raw) == pytest.approx(vector(ask()), abs=1e-6)


# Messages


@effect("thinking.type", MESSAGES_PATH, COUNT)
def thinking_is_a_variable_of_the_template(ask: Ask) -> None:
    for kind, added in (("enabled", OPEN), ("adaptive", OPEN), ("disabled", CLOSED)):
        assert extra_tokens(ask, thinking={"type": kind}) == added
    if ask.path == MESSAGES_PATH:
        assert len(ask(thinking={"type": "enabled"}).thoughts) == NUM_TOKENS


@effect("thinking.display", MESSAGES_PATH, COUNT)
def thoughts_come_without_text_if_asked(ask: Ask) -> None:
    omitted = {"type": "enabled", "display": "omitted"}
    assert extra_tokens(ask, thinking=omitted) == OPEN
    if ask.path == MESSAGES_PATH:
        (block, *_) = ask(thinking=omitted).body["content"]
        assert (block["type"], block["thinking"]) == ("thinking", "")


@effect("output_config.effort", MESSAGES_PATH, COUNT)
def an_effort_of_messages_is_a_variable_of_the_template(ask: Ask) -> None:
    assert extra_tokens(ask, output_config={"effort": "high"}) == EFFORT


@effect("output_config.format", MESSAGES_PATH, COUNT)
def an_output_format_binds_the_answer(ask: Ask) -> None:
    form = {"output_config": {"format": {"type": "json_schema", "schema": COLOUR}}}
    if ask.path == COUNT:
        assert extra_tokens(ask, **form) == 0
        return
    check_bound(ask, '"(red|blue)"', **form)
    assert ask.refused(output_config={"format": {"type": "xml"}}) == "output_config.format"


@effect("stop_sequences", MESSAGES_PATH)
def a_stop_sequence_cuts_the_answer(ask: Ask) -> None:
    check_stop(ask, "stop_sequences")


# The server's own


@effect("prompt", TOKENIZE)
def a_text_is_encoded(ask: Ask) -> None:
    assert ask(prompt="Ho").body["tokens"] == [TOKEN_IDS["<|im_start|>"], BYTE_IDS["H"], BYTE_IDS["o"]]
    assert ask.refused(messages=HELLO) == "prompt"
    assert ask.refused(prompt=...) == "prompt"


@effect("tokens", DETOKENIZE)
def token_ids_are_decoded(ask: Ask) -> None:
    assert ask(tokens=[TOKEN_IDS["<|im_end|>"], BYTE_IDS["H"]]).body == {"prompt": "<|im_end|>H"}
    assert ask.refused(tokens=[10**6]) == "tokens"


def test_the_page_has_all_fields_and_no_others() -> None:
    for path, model in CLASSES.items():
        own = names_of(model) | set(OF_CHATS if path == TOKENIZE else ())
        assert {name for at, name in FIELDS if at == path} == own, path


def test_each_documented_field_has_its_check() -> None:
    assert set(CHECKS) == {key for key, one in FIELDS.items() if one.kind == "yes"}
    assert {name for (_, name), one in FIELDS.items() if one.kind == "no effect"} == set(WITHOUT_EFFECT)


@pytest.mark.parametrize(("path", "name"), fields_of_kind("yes"))
def test_a_field_has_the_effect_that_is_documented(ask: Ask, path: str, name: str) -> None:
    CHECKS[path, name](ask)


WITHOUT_EFFECT: dict[str, Any] = {
    "stream_options.include_obfuscation": True,
    "stream_options.include_usage": True,
    "user": "someone",
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "verbosity": "low",
    "text.verbosity": "low",
    "max_tool_calls": 1,
    "prompt_cache_options": {"mode": "x"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "store": True,
    "thinking.budget_tokens": 1024,
    "cache_control": {"type": "ephemeral"},
    "speed": "fast",
    "user_profile_id": "x",
    "workspace_id": "x",
    "inference_geo": "eu",
    "diagnostics": {"a": 1},
}
"""A value of each field that changes nothing."""


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return a field of a body, which may be inside of another; other fields that it needs are given, too."""
    outer, _, inner = name.partition(".")
    needed = {"thinking": {"type": "enabled"}, "tool_choice": {"type": "auto"}}.get(outer, {}) if inner else {}
    return {outer: {**needed, inner: value}} if inner else {outer: value}


@pytest.mark.parametrize(("path", "name"), fields_of_kind("no effect"))
def test_a_field_without_effect_changes_nothing(ask: Ask, path: str, name: str) -> None:
    plain, given = nested(name, None), nested(name, WITHOUT_EFFECT[name])
    found = ask(**given)
    assert found.content == ask(**plain).content
    assert found.ignored == ((name,) if name == "thinking.budget_tokens" else ())
    if path == RESPONSES and name in ("max_tool_calls", "safety_identifier", "prompt_cache_key", "text.verbosity"):
        outer, _, inner = name.partition(".")
        assert (found.body[outer][inner] if inner else found.body[outer]) == WITHOUT_EFFECT[name]


def test_a_stream_of_responses_ends_with_the_numbers_of_tokens(http: httpx.Client) -> None:
    for wanted in (True, False):
        last = Ask(http, RESPONSES).events(stream_options={"include_usage": wanted})[-1]
        assert last["response"]["usage"]["output_tokens"] == NUM_TOKENS


@pytest.mark.parametrize(("path", "name"), fields_of_kind("only"))
def test_a_field_takes_the_values_without_effect_alone(ask: Ask, path: str, name: str) -> None:
    plain = ask()
    for value in FIELDS[path, name].values:
        found = ask(**{name: value})
        assert (found.content, found.ignored) == (plain.content, ())
    for other in (True, 2, "other", ["other"], {"other": 1}):
        assert ask.refused(**{name: other}) == name


@pytest.mark.parametrize(("path", "name"), fields_of_kind("no"))
def test_a_field_is_refused(ask: Ask, path: str, name: str) -> None:
    for value in (True, "x", {"a": 1}):
        assert ask.refused(**{name: value}) == name
    assert ask(**{name: None}).content == ask().content


REQUIRED = {"messages", "prompt", "input", "tokens"}


def is_needed(path: str, name: str) -> bool:
    """Return whether a request without the field is refused."""
    in_body = name in BODIES[path] and (name in REQUIRED or path == MESSAGES_PATH)
    return in_body or name in ("tool_choice.type", "thinking.type")


@pytest.mark.parametrize(
    ("path", "name"), [pytest.param(*key, id=f"{key[0]}-{key[1]}") for key in FIELDS if is_needed(*key)]
)
def test_a_field_that_is_needed_may_not_be_null(ask: Ask, path: str, name: str) -> None:
    assert ask.refused(**nested(name, None)) == name


@pytest.mark.parametrize("path", CLASSES)
def test_fields_that_are_null_count_as_left_out(ask: Ask, path: str) -> None:
    """All fields of the body at once, and then all fields inside of each field."""
    names = [name for at, name in FIELDS if at == path and not is_needed(at, name)]
    bare = {name: None for name in names if "." not in name}
    found, expected = ask(**bare), ask(**dict.fromkeys(bare, ...))
    assert (found.content, found.ignored) == (expected.content, ())
    for outer in {name.partition(".")[0] for name in names if "." in name}:
        inside = {
            name: value
            for each in names
            if each.startswith(f"{outer}.")
            for name, value in nested(each, None)[outer].items()
        }
        found, expected = ask(**{outer: inside}), ask(**({outer: {"type": "enabled"}} if outer == "thinking" else {}))
        assert (found.content, found.ignored) == (expected.content, ()), inside


INSIDE = {CHAT: "stream_options", RESPONSES: "reasoning", MESSAGES_PATH: "output_config"}


@pytest.mark.parametrize("path", CLASSES)
def test_unknown_fields_are_ignored_and_named(ask: Ask, path: str) -> None:
    found = ask(zebra=1)
    assert (found.content, found.ignored) == (ask().content, ("zebra",))
    if path in INSIDE:
        assert ask(**{INSIDE[path]: {"zebra": 1}}).ignored == (f"{INSIDE[path]}.zebra",)


def biases(count: int) -> dict[str, float]:
    """Return a logit_bias of so many entries; ids are written with zeros before them."""
    return {"0" * at + LETTER: 1.0 for at in range(count)}


LIMITS: list[tuple[tuple[str, ...], str, list[Any], list[Any]]] = [
    (SAMPLED, "temperature", [0, 100], [-0.1, 100.1]),
    (SAMPLED, "top_p", [0, 1], [-0.1, 1.1]),
    (SAMPLED, "min_p", [0, 1], [-0.1, 1.1]),
    (SAMPLED, "top_k", [-1, 10**6], [-2]),
    (SAMPLED, "repetition_penalty", [0.01, 100], [0.009, 0, 100.1]),
    (SAMPLED, "presence_penalty", [-2, 2], [-2.1, 2.1]),
    (SAMPLED, "frequency_penalty", [-2, 2], [-2.1, 2.1]),
    (SAMPLED, "dry_multiplier", [0, 100], [-0.1]),
    (SAMPLED, "dry_base", [0, 4], [-0.1]),
    (SAMPLED, "dry_allowed_length", [0, 10**6], [-1]),
    (SAMPLED, "dry_penalty_last_n", [-1, 10**6], [-2]),
    (SAMPLED, "dry_sequence_breakers", [[], ["a"] * 64, ["x" * 40]], [["a"] * 65, ["x" * 41], [""], "a", [1]]),
    (SAMPLED, "top_n_sigma", [-1, 100], [-1.1]),
    (SAMPLED, "xtc_probability", [0, 1], [-0.1, 1.1]),
    (SAMPLED, "xtc_threshold", [0, 1], [-0.1, 1.1]),
    (SAMPLED, "logit_bias", [biases(4096), {LETTER: -100}], [biases(4097), {LETTER: 101}, {"x": 1}]),
    (SAMPLED, "stop_token_ids", [[0] * 4096], [[0] * 4097, [10**6]]),
    (SAMPLED, "min_tokens", [0], [-1]),
    (SAMPLED, "grammar", [f"start: r0\n{RULES}\nEND: /b/"], [f"start: r0\n{RULES}\nEND: /b/\nMORE: /c/"]),
    ((CHAT, COMPLETIONS), "n", [MOST_ANSWERS], [MOST_ANSWERS + 1, 0]),
    ((CHAT, COMPLETIONS), "stop", [["~#"] * 16], [["~#"] * 17, ""]),
    ((CHAT, RESPONSES), "top_logprobs", [0], [-1, 21]),
    ((COMPLETIONS,), "logprobs", [20], [-1, 21]),
    ((COMPLETIONS,), "prompt", [["Hi"] * 64], [["Hi"] * 257]),
    ((EMBEDDINGS,), "input", [["Hi"] * 64], [["Hi"] * 257]),
    ((RESPONSES,), "metadata", [{str(at): "" for at in range(16)}], [{str(at): "" for at in range(17)}]),
    ((MESSAGES_PATH,), "temperature", [0, 2], [-0.1, 2.1]),
    ((MESSAGES_PATH,), "top_p", [0, 1], [-0.1, 1.1]),
    ((MESSAGES_PATH,), "top_k", [0], [-1]),
    ((MESSAGES_PATH,), "stop_sequences", [["~#"] * 16], [["~#"] * 17]),
]
"""Paths, a field, values at its limits, and values beyond them."""


@pytest.mark.parametrize(
    ("path", "name", "taken", "refused"),
    [pytest.param(path, *limit, id=f"{path}-{limit[0]}") for paths, *limit in LIMITS for path in paths],
)
def test_a_limit_is_where_it_is_documented(
    ask: Ask, path: str, name: str, taken: list[Any], refused: list[Any]
) -> None:
    for value in taken:
        ask(**{name: value})
    for value in refused:
        assert ask.refused(**{name: value}).startswith(name)


def test_a_strict_server_refuses_other_names_of_models_and_unknown_fields(running: Running) -> None:
    engine = running.served.engine
    with running_server(lambda: engine, strict=True) as strict, strict.client() as http:
        for path in CLASSES:
            ask = Ask(http, path)
            assert ask.send({"model": "gpt-x"}).status_code == 404, path
            assert ask.refused(model="tiny", zebra=1) in ("zebra", "'zebra'")
            assert ask(model="tiny").body
            if path in (TOKENIZE, DETOKENIZE):
                assert ask().body
            else:
                assert ask.refused() == "model"
        assert Ask(http, TOKENIZE)(prompt=..., messages=HELLO, tools=TOOLS).body["count"] > 0
