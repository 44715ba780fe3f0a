"""A server and requests that are made to mislead it: heads, bodies, sizes, and clients that leave at any time."""

import json
import logging
import re
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import SECONDS, Running, running_server
from support.tiny_models import TinyModel, add_tokenizer

from graphcore import Engine
from graphcore.engine.request import Request
from graphcore.errors import ConfigError
from graphcore.serving.event_streams import event_of
from graphcore.serving.http_exchange import JsonLines
from graphcore.serving.http_server import SPARE_CONNECTIONS, allow_files
from graphcore.tokenizer import grammar
from graphcore.tokenizer.grammar import GrammarTrials

SHORT = {"prompt": "abc", "max_tokens": 2}
TEMPLATE = (
    "{% if messages[0].content == 'refuse me' %}{{ raise_exception('refused!') }}{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<|end|>{% endfor %}assistant:"
)
KEY = "open sésame"


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "llama3"
    shutil.copytree(tiny_model("llama3").folder, path)
    add_tokenizer(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    sizes = ["batching.max_sequences=2", "context_length=4096"]
    with Engine.load(folder, dtype="fp32", device="cpu", overrides=sizes) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Running]:
    with running_server(lambda: engine) as running:
        yield running


@pytest.fixture(scope="module")
def locked(engine: Engine) -> Iterator[Running]:
    with running_server(lambda: engine, api_key=KEY) as running:
        yield running


def answered(running: Running, head: list[str], body: bytes = b"") -> tuple[int, bytes]:
    """Return status and head of the answer to a request that is sent as it is."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            piece = connection.recv(65536)
            assert piece, "the connection was cut without an answer"
            received += piece
    return int(received.split(b" ", 2)[1]), received


@pytest.mark.parametrize("host", ["localhost/health?x=", "localhost/health#", "localhost:80/ping?", "a@localhost"])
def test_a_host_header_does_not_open_a_path(locked: Running, host: str) -> None:
    status, _ = answered(locked, ["GET /v1/models HTTP/1.1", f"Host: {host}"])
    assert status in (401, 403)


@pytest.mark.parametrize("host", ["[", "[::1", "localhost:x", "localhost localhost", "localhost/", "x@localhost", ""])
def test_a_host_that_is_none_is_refused(running: Running, host: str) -> None:
    assert answered(running, ["GET /v1/models HTTP/1.1", f"Host: {host}"])[0] == 403


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//localhost", "ftp://localhost", "http://x@localhost"])
def test_an_origin_that_is_none_is_refused(running: Running, origin: str) -> None:
    assert answered(running, ["GET /v1/models HTTP/1.1", "Host: localhost", f"Origin: {origin}"])[0] == 403


def test_one_of_two_keys_that_a_client_sends_is_enough_and_may_have_any_letters(locked: Running) -> None:
    head = ["GET /v1/models HTTP/1.1", "Host: localhost"]
    assert answered(locked, [*head, f"x-api-key: {KEY}"])[0] == 200
    assert answered(locked, [*head, "x-api-key: other", f"Authorization: Bearer {KEY}"])[0] == 200
    assert answered(locked, [*head, "x-api-key: other", "Authorization: Bearer other"])[0] == 401


def test_unknown_paths_need_the_key_too_and_no_path_redirects(locked: Running, running: Running) -> None:
    with locked.client() as http:
        assert http.get("/v1/nothing").status_code == 401
        assert http.options("/v1/completions").status_code == 401
        assert http.head("/v1/models").status_code == 401
    with running.client() as http:
        assert http.post("/v1/completions/", json=SHORT).status_code == 404
        response = http.put("/v1/completions", json=SHORT)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("given", ["a status=500", "\x01", "é", ""])
def test_a_request_id_that_would_confuse_the_log_is_replaced(running: Running, given: str) -> None:
    status, head = answered(running, ["GET /ping HTTP/1.1", "Host: localhost", f"X-Request-ID: {given}"])
    assert status == 400 or b"x-request-id: req-" in head


def test_names_of_ignored_fields_are_cut(running: Running) -> None:
    with running.client() as http:
        response = http.post("/v1/completions", json={**SHORT, "x" * 100_000: 1, "a\nb": 2})
    assert response.headers["x-ignored-fields"] == "x" * 60 + ', "a\\nb"'


@pytest.mark.parametrize(
    "text",
    [
        '"metadata": {"a": "\\ud800"}',
        '"\\udfff": 1',
        '"metadata": {"a": 1e400}',
        '"metadata": {"a": -1e999}',
        '"metadata": {"a": Infinity}',
    ],
)
def test_what_an_answer_could_not_repeat_is_refused(running: Running, text: str) -> None:
    body = f'{{"input": "hi", "max_output_tokens": 1, {text}}}'
    with running.client() as http:
        for stream in ("", ', "stream": true'):
            sent = f"{body[:-1]}{stream}}}".encode()
            response = http.post("/v1/responses", content=sent, headers={"content-type": "application/json"})
            assert response.status_code == 400, response.text
        raw = b'{"prompt": "\xed\xa0\x80"}'  # half a surrogate pair as bytes
        response = http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": 5}, "input"),
        ("/v1/completions", {"prompt": 5}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 257}, "prompt"),
        ("/v1/completions", {"prompt": [1.5] * 100_000}, "prompt"),
        ("/v1/completions", {**SHORT, "stop": 5}, "stop"),
        ("/v1/completions", {**SHORT, "stop_token_ids": [1] * 5000}, "stop_token_ids"),
        ("/v1/completions", {**SHORT, "logit_bias": {str(at): "x" for at in range(5000)}}, "logit_bias"),
        ("/v1/completions", {**SHORT, "structured_outputs": {"choice": 5}}, None),
        ("/v1/completions", {**SHORT, "choice": ["x" * 300_000]}, None),
        ("/v1/completions", {**SHORT, "guided_json": "a"}, None),
        ("/v1/completions", {**SHORT, "repetition_penalty": 1e-9}, "repetition_penalty"),
        ("/v1/completions", {**SHORT, "logit_bias": {"99999": 1}}, "logit_bias"),
        ("/v1/completions", {**SHORT, "logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {**SHORT, "stop_token_ids": [99999]}, "stop_token_ids"),
        ("/v1/completions", {**SHORT, "n": 2**63}, "n"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2**63}, "n"),
        ("/v1/responses", {"input": "hi", "metadata": {str(at): "x" for at in range(17)}}, "metadata"),
        ("/v1/responses", {"input": [5] * 1000}, "input.0"),
    ],
)
def test_values_of_a_wrong_kind_are_400_at_once(running: Running, path: str, body: Any, field: str | None) -> None:
    with running.client() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert field in (None, response.json()["error"]["param"])
    assert response.elapsed.total_seconds() < 5
    assert len(response.text) < 500


def test_too_many_stop_sequences_are_refused(running: Running) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["x"] * 17}
    with running.client() as http:
        error = http.post("/v1/messages", json=body).json()["error"]
    assert "stop_sequences" in error["message"]


def test_a_null_inside_of_a_field_counts_as_left_out(running: Running) -> None:
    body = {**SHORT, "stream": True, "stream_options": {"include_usage": None}}
    with running.client() as http:
        assert http.post("/v1/completions", json=body).status_code == 200


def leaves(running: Running, path: str, body: dict[str, Any], is_there: Callable[[], bool]) -> None:
    """Send a request, wait until something is true, and close the connection."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + text)
        running.wait_for(is_there)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["x" * 500] * 200}),
        ("/v1/completions", {"prompt": ["x" * 100] * 200, "max_tokens": 300, "n": 3}),
        ("/v1/completions", {"prompt": ["x" * 100] * 200, "max_tokens": 300, "stream": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 16, "ignore_eos": True},
        ),
    ],
)
def test_a_client_that_leaves_ends_all_its_requests(running: Running, path: str, body: dict[str, Any]) -> None:
    leaves(running, path, body, lambda: running.num_requests() > 4)
    running.wait_for(lambda: running.num_requests() == 0, seconds=5)
    running.wait_for(lambda: running.served.num_running == 0, seconds=5)


def test_what_does_not_fit_in_the_queue_now_is_429_and_what_never_fits_is_400(folder: Path) -> None:
    sizes = ["batching.max_sequences=1", "batching.max_waiting=3", "context_length=4096"]
    with (
        Engine.load(folder, dtype="fp32", device="cpu", overrides=sizes) as engine,
        running_server(lambda: engine) as running,
        running.client() as http,
    ):
        assert http.post("/v1/embeddings", json={"input": ["a"] * 3}).status_code == 200
        assert http.post("/v1/embeddings", json={"input": ["a"] * 4}).status_code == 400
        assert http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2}).status_code == 400
        handles = [engine.submit("abc", max_new_tokens=4000, ignore_eos=True) for _ in range(2)]
        running.wait_for(lambda: running.num_decoding() == 1)
        response = http.post("/v1/embeddings", json={"input": ["a"] * 3})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        for handle in handles:
            handle.cancel()


def test_equal_prompts_of_one_request_have_answers_of_their_own(running: Running) -> None:
    body = {"max_tokens": 12, "seed": 3, "temperature": 1.0}
    with running.client() as http:
        several = http.post("/v1/completions", json={**body, "prompt": ["ab", "ab"], "n": 2}).json()["choices"]
        alone = http.post("/v1/completions", json={**body, "prompt": "ab", "n": 4}).json()["choices"]
    assert [choice["text"] for choice in several] == [choice["text"] for choice in alone]
    assert len({choice["text"] for choice in several}) == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_wrong_grammar_is_400_in_a_stream_too(running: Running, path: str) -> None:
    prompts = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    with running.client() as http:
        for grammar in ({"regex": "("}, {"grammar": "start: missing"}, {"guided_json": {"type": "strange"}}):
            response = http.post(path, json={**prompts, "max_tokens": 2, "stream": True, **grammar})
            assert response.status_code == 400, response.text


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2**63}}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/v1/completions", {"guided_json": SCHEMA}),
    ("/v1/completions", {"structured_outputs": {"json": SCHEMA}}),
    ("/v1/completions", {"grammar": f"start: %json {json.dumps(SCHEMA)}"}),
    ("/v1/completions", {"guided_grammar": f"start: %json {json.dumps(SCHEMA)}"}),
]
"""Requests with a schema in each field that may hold one; tools are in test_serving_tools.py."""


@pytest.mark.parametrize("place", ["bounds", "trial"])
def test_a_grammar_that_cannot_be_kept_or_compiled_is_400_in_every_interface(
    running: Running, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The trial is that of a process that dies, as it would of a fault in llguidance that nobody knows yet."""
    said = r"cannot be kept; numbers above -2\*\*63" if place == "bounds" else "ended its process"
    if place == "trial":
        monkeypatch.setattr(grammar, "with_kept_bounds", lambda schema: schema)
        monkeypatch.setattr(GrammarTrials, "problem", lambda *_: "the grammar ended its process (SIGSEGV)")
    texts = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    keys = {"/v1/completions": "prompt", "/v1/responses": "input"}
    asked = [*ASKED, *(("/v1/completions", {name: "a"}) for name in ("regex", "guided_regex") if place == "trial")]
    with running.client() as http:
        for path, given in asked:
            key = keys.get(path, "messages")
            limit = "max_output_tokens" if key == "input" else "max_tokens"
            response = http.post(path, json={key: texts[key], limit: 16, **given})
            assert response.status_code == 400, (path, given, response.text)
            assert re.search(said, response.json()["error"]["message"]), response.text
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_the_usual_ends_of_int64_are_taken(running: Running) -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    with running.client() as http:
        response = http.post("/v1/completions", json={**SHORT, "guided_json": schema})
    assert response.status_code == 200, response.text
    assert re.match(r"-?[0-9]*$", response.json()["choices"][0]["text"])


@pytest.mark.parametrize("grammar", ["\n".join(f"r{at}: r{at + 1}" for at in range(5000)), "a ::= b\n" * 3000])
def test_a_grammar_of_thousands_of_rules_is_refused(running: Running, grammar: str) -> None:
    with running.client() as http:
        response = http.post("/v1/completions", json={**SHORT, "grammar": grammar})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "grammar")


def test_a_prompt_that_no_context_holds_is_refused_before_it_is_encoded(
    running: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> None:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(type(engine.tokenizer), "encode", encode)
    monkeypatch.setattr(type(engine.tokenizer), "encode_chat", encode)
    text = "x" * (4096 * running.served.longest_token + 1)
    with running.client() as http:
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/embeddings", {"input": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
            ("/tokenize", {"prompt": text}),
        ):
            response = http.post(path, json=body)
            assert response.status_code == 400
            assert "context length" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_a_time_limit_ends_has_a_reason_and_all_text(engine: Engine, path: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4000, "ignore_eos": True}
    with running_server(lambda: engine, request_timeout=0.2) as running, running.client() as http:
        text = http.post(path, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert choices[-1]["finish_reason"] == "length"
    assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)


def test_end_tokens_are_ignored_in_chats_too(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "logit_bias": {"0": 100}}
    with running.client() as http:
        answers = [
            http.post("/v1/chat/completions", json={**body, "ignore_eos": ignores}).json() for ignores in (False, True)
        ]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [1, 9]


def test_offsets_of_a_streamed_completion_go_on(running: Running) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 6, "logprobs": 1, "seed": 1, "ignore_eos": True}
    with running.client() as http:
        whole = http.post("/v1/completions", json=body).json()["choices"]
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
        refused = http.post("/v1/completions", json={**body, "stream": True, "echo": True})
    found: dict[int, list[int]] = {0: [], 1: []}
    for line in lines:
        (choice,) = json.loads(line)["choices"]
        found[choice["index"]] += choice["logprobs"]["text_offset"]
    assert [found[0], found[1]] == [choice["logprobs"]["text_offset"] for choice in whole]
    assert refused.status_code == 400


def test_unknown_fields_inside_of_known_ones_are_named(running: Running) -> None:
    body = {**SHORT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    with running.client() as http:
        response = http.post("/v1/completions", json=body)
    assert response.headers["x-ignored-fields"] == "stream_options.continuous_usage_stats"


def test_messages_are_tokenized_as_a_chat_encodes_them(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    with running.client() as http:
        found = http.post("/tokenize", json=body).json()
        asked = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
        counted = http.post("/v1/messages/count_tokens", json=body).json()
    assert found["count"] == len(found["tokens"]) == asked["usage"]["prompt_tokens"] == counted["input_tokens"]


def test_lines_of_the_log_are_json_if_asked_whatever_a_client_sends(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="graphcore.serving")
    lines: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(JsonLines())
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    log = logging.getLogger("graphcore.serving")
    log.addHandler(handler)
    try:
        with running.client() as http:
            http.post("/v1/completions", json={**SHORT, 'a" status=500\n': 1, "stop": "x\n{}"})
            http.get("/v1/%22%0A{")
            log.error("a failure\nin two lines", exc_info=ValueError("x"))
    finally:
        log.removeHandler(handler)
    found = [json.loads(line) for line in lines]
    assert [one.get("status") for one in found] == [200, 404, None]
    assert found[2]["message"] == "a failure\nin two lines"
    assert not any("\n" in line for line in lines)


def test_an_event_has_one_line_for_every_client() -> None:
    event = event_of({"text": "a\u2028b\u2029c\x85d\u4e2d\n"})
    assert len(event["data"].splitlines()) == 1
    assert json.loads(event["data"]) == {"text": "a\u2028b\u2029c\x85d\u4e2d\n"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_end_as_they_are_after_the_grace(
    engine: Engine, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Request.take

    def slowly(self: Request, *token: Any) -> None:
        """Take a millisecond: a fast machine would be done before the signal."""
        time.sleep(0.001)
        take(self, *token)

    monkeypatch.setattr(Request, "take", slowly)
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4000, "ignore_eos": True}
    with running_server(lambda: engine, grace=0) as running, running.client() as http:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(http.post(path, json={**body, "stream": stream})))
        thread.start()
        running.wait_for(lambda: any(one.new_tokens > 3 for one in engine.status()))
        running.server.handle_exit(15, None)
        running.thread.join(SECONDS)
        assert not running.thread.is_alive()
        thread.join(SECONDS)
    (response,) = found
    assert response.status_code == 200
    if stream:
        *lines, last = [line for line in response.text.splitlines() if line.startswith("data:")]
        assert last == "data: [DONE]"
        assert json.loads(lines[-1].removeprefix("data:"))["choices"][0]["finish_reason"] == "length"
    else:
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert 0 < response.json()["usage"]["completion_tokens"] < 4000
    running.wait_for(lambda: running.num_requests() == 0, seconds=10)


def test_a_conversation_of_thousands_of_turns_is_encoded_in_little_time(running: Running) -> None:
    """The time is about linear; that of a list of all tokens for each control token would be a minute."""
    roles = ["user", "assistant"] * 5000
    with running.client() as http:
        response = http.post("/tokenize", json={"messages": [{"role": role, "content": "a"} for role in roles]})
    assert response.status_code == 200
    assert response.elapsed.total_seconds() < 15


def test_arguments_of_calls_that_are_nested_too_deeply_are_left_out(running: Running) -> None:
    """A model may have written them, and the conversation goes on."""
    for deep in ('{"a":' * 500 + "1" + "}" * 500, "[" * 190 + "]" * 190, "[" * 100_000):
        call = {"id": "1", "function": {"name": "f", "arguments": f'{{"b": 1, "a": {deep}}}'}}
        messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]
        items = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": deep}]
        use = {"type": "tool_use", "id": "1", "name": "f", "input": deep}
        blocks = [{"role": "assistant", "content": [use]}, {"role": "user", "content": "x"}]
        with running.client() as http:
            for path, body in (
                ("/tokenize", {"messages": messages}),
                ("/v1/chat/completions", {"messages": messages, "max_tokens": 1}),
                ("/v1/responses", {"input": items, "max_output_tokens": 1}),
                ("/v1/messages", {"messages": blocks, "max_tokens": 1}),
            ):
                response = http.post(path, json=body)
                assert response.status_code == 200, response.text


@pytest.mark.thorough
def test_a_client_that_does_not_read_a_whole_answer_is_cut(engine: Engine) -> None:
    with running_server(lambda: engine, send_timeout=0.5) as running:
        host, _, port = running.url.removeprefix("http://").partition(":")
        text = json.dumps({"tokens": [0] * 200_000}).encode()
        head = ["POST /detokenize HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        sent = "\r\n".join([*head, f"Content-Length: {len(text)}", "", ""]).encode() + text
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(SECONDS)
            connection.connect((host, int(port)))
            connection.sendall(sent)
            running.wait_for(lambda: len(running.server.server_state.connections) == 1)
            running.wait_for(lambda: not running.server.server_state.connections, seconds=20)


def test_connections_beyond_the_limit_are_cut_at_once(engine: Engine) -> None:
    with running_server(lambda: engine, max_connections=10) as running, running.client() as http:
        assert http.get("/ping").status_code == 200
        host, _, port = running.url.removeprefix("http://").partition(":")
        idle = [socket.create_connection((host, int(port)), timeout=SECONDS) for _ in range(200)]
        running.wait_for(lambda: len(running.server.server_state.connections) == 10 + SPARE_CONNECTIONS)
        assert http.get("/ping").status_code == 503
        for path in ("/v1/chat/completions", "/v1/messages"):
            running.wait_for(lambda: len(running.server.server_state.connections) < 10 + SPARE_CONNECTIONS)
            refused = http.post(path, json={})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["type"] == "overloaded_error"
            assert ("request_id" in refused.json()) == (path == "/v1/messages")  # which Anthropic's errors have
        for connection in idle:
            connection.close()
        running.wait_for(lambda: len(running.server.server_state.connections) < 5)
        assert http.get("/ping").status_code == 200


def test_the_limit_of_open_files_is_raised_as_far_as_the_machine_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        allow_files(before[0])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
        allow_files(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
        if before[1] != resource.RLIM_INFINITY:
            with pytest.raises(ConfigError, match="max_connections"):
                allow_files(before[1] + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_messages_that_the_template_refuses_are_400(running: Running) -> None:
    with running.client() as http:
        for path in ("/v1/chat/completions", "/v1/messages/count_tokens", "/tokenize"):
            response = http.post(path, json={"messages": [{"role": "user", "content": "refuse me"}]})
            assert response.status_code == 400, response.text
            assert "refused!" in response.json()["error"]["message"]
