"""What clients get from a server: answers equal to the engine's own, and errors that name the field."""

import base64
import json
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pytest
import torch
from support.serving import SECONDS, Running, running_server
from support.tiny_models import TinyModel, add_tokenizer

from graphcore import Engine
from graphcore.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
SIZES = ["batching.max_sequences=4", "context_length=512", "prefill_chunk=16"]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "llama3"
    shutil.copytree(tiny_model("llama3").folder, path)
    add_tokenizer(path)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "do_sample": False}))
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder, dtype="fp32", device="cpu", overrides=SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Running]:
    with running_server(lambda: engine, max_body_bytes=100_000, max_tools=2, max_answers=4) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": ASKED, "max_tokens": 12, "seed": 1, **fields})


def engine_answer(engine: Engine, messages: Any = ASKED, **settings: Any) -> Any:
    asked = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1, **settings}
    return engine.submit(engine.chat_ids(messages), **asked).result(SECONDS)


def test_a_chat_answers_as_the_engine_does(client: openai.OpenAI, engine: Engine) -> None:
    expected = engine_answer(engine)
    answer = chat(client)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(engine.chat_ids(ASKED)), 12)
    assert answer.model == "tiny"


def test_a_streamed_chat_has_the_same_text_and_its_usage_at_the_end(client: openai.OpenAI, engine: Engine) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == engine_answer(engine).text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_ends_with_done(running: Running) -> None:
    body = {"messages": ASKED, "max_tokens": 2, "stream": True}
    with running.client() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data:")) for line in lines[:-1])


def test_without_a_seed_answers_differ_and_with_one_they_do_not(client: openai.OpenAI) -> None:
    free = {chat(client, seed=None).choices[0].message.content for _ in range(4)}
    assert len(free) > 1
    assert len({chat(client, seed=7).choices[0].message.content for _ in range(3)}) == 1


def test_every_sampling_field_reaches_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    fields: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 1.5, "frequency_penalty": -0.5}
    more = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "stop_token_ids": [9]}
    biased = {"40": 5.0}
    answer = chat(client, **fields, logit_bias=biased, extra_body=more)
    expected = engine_answer(engine, **fields, **more, logit_bias={40: 5.0})
    assert answer.choices[0].message.content == expected.text


def test_stop_strings_end_an_answer_and_are_not_part_of_it(client: openai.OpenAI, engine: Engine) -> None:
    whole = engine_answer(engine).text
    answer = chat(client, stop=[whole[5:7]])
    assert answer.choices[0].message.content == whole[: whole.index(whole[5:7])]
    assert answer.choices[0].finish_reason == "stop"


def test_several_answers_are_numbered_and_equal_the_engines(client: openai.OpenAI, engine: Engine) -> None:
    handle = engine.submit(engine.chat_ids(ASKED), 12, n=3, temperature=1.0, seed=1)
    expected = [one.text for one in handle.results(SECONDS)]
    assert [choice.message.content for choice in chat(client, n=3).choices] == expected
    texts = ["", "", ""]
    for chunk in chat(client, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_log_probabilities_are_those_of_the_logits(client: openai.OpenAI, engine: Engine) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=5)
    entries = answer.choices[0].logprobs.content
    prompt = engine.chat_ids(ASKED)
    tokens = [engine.tokenizer.encode(entry.token)[0] for entry in entries]
    logits = engine.logits([[*prompt, *tokens]])
    assert isinstance(logits, torch.Tensor)
    for at, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        expected = logits[0, len(prompt) - 1 + at].double().log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        found = [one.logprob for one in entry.top_logprobs]
        assert found == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token


def test_echoed_prompts_have_their_log_probabilities(client: openai.OpenAI, engine: Engine) -> None:
    prompt = "Hello, world"
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, echo=True, logprobs=2, temperature=0)
    found = answer.choices[0].logprobs
    ids = engine.tokenizer.encode(prompt)
    logits = engine.logits([ids])
    assert isinstance(logits, torch.Tensor)
    logprobs = logits[0].double().log_softmax(-1)
    expected = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
    assert "".join(found.tokens[:-1]) == prompt
    assert found.text_offset == list(range(len(prompt) + 1))
    assert answer.choices[0].text.startswith(prompt)


def test_a_prompt_alone_can_be_scored(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=1)
    assert len(answer.choices[0].logprobs.tokens) == 3
    assert answer.usage.completion_tokens == 0


def test_completions_take_texts_and_token_ids_one_or_several(client: openai.OpenAI, engine: Engine) -> None:
    ids = [engine.tokenizer.encode(text) for text in ("abc", "xyz!")]
    expected = [engine.submit(row, 6, temperature=0).result(SECONDS).text for row in ids]
    for prompt in (["abc", "xyz!"], ids):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, n=2)
        assert [choice.text for choice in answer.choices] == [expected[0], expected[0], expected[1], expected[1]]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    endless = client.completions.create(model="tiny", prompt=ids[0], extra_body={"ignore_eos": True})
    assert endless.usage.completion_tokens == 16
    texts = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt=ids, max_tokens=6, temperature=0, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_embeddings_are_the_engines_as_numbers_and_as_base64(client: openai.OpenAI, engine: Engine) -> None:
    expected = engine.embed(["one", "two words"]).numpy()
    found = client.embeddings.create(model="tiny", input=["one", "two words"])  # the client asks for base64
    assert np.array([one.embedding for one in found.data]) == pytest.approx(expected, abs=1e-6)
    plain = client.embeddings.create(model="tiny", input="one", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(expected[0], abs=1e-6)
    raw = client.embeddings.with_raw_response.create(model="tiny", input="one", encoding_format="base64")
    text = json.loads(raw.text)["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4") == pytest.approx(expected[0], abs=1e-6)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def test_answers_under_a_schema_are_valid_whole_and_streamed(client: openai.OpenAI) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    valid = 0
    for seed in range(6):
        answer = chat(client, seed=seed, response_format=named, max_tokens=200).choices[0]
        chunks = chat(client, seed=seed, response_format=named, max_tokens=200, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == answer.message.content
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content), SCHEMA)
            valid += 1
    assert valid >= 3


@pytest.mark.parametrize(
    "body",
    [
        {"regex": "[ab]{3}c"},
        {"choice": ["aaac", "bbbc"]},
        {"grammar": "start: /[ab]{3}c/"},
        {"grammar": 'root ::= [ab] [ab] [ab] "c"'},
        {"structured_outputs": {"regex": "[ab]{3}c"}},
        {"guided_regex": "[ab]{3}c"},
    ],
)
def test_grammars_in_every_form_bind_the_answer(client: openai.OpenAI, body: dict[str, Any]) -> None:
    content = chat(client, extra_body=body).choices[0].message.content
    assert len(content) == 4
    assert set(content[:3]) <= set("ab")
    assert content[3] == "c"


def test_a_chats_next_turn_finds_its_pages(client: openai.OpenAI) -> None:
    first = chat(client, seed=3, max_tokens=40)
    turns = [
        *ASKED,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = chat(client, messages=turns)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_exact_chats_have_the_bits_of_an_empty_cache(engine: Engine, folder: Path) -> None:
    first = engine_answer(engine, seed=3, max_new_tokens=40)
    turns = [*ASKED, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    with Engine.load(folder, dtype="fp32", device="cpu", overrides=SIZES) as empty:
        expected = engine_answer(empty, turns, logprobs=True, temperature=1.0)
    with running_server(lambda: engine, exact=True) as exact:
        own = openai.OpenAI(base_url=f"{exact.url}/v1", api_key="none")
        assert chat(own, seed=3, max_tokens=40).choices[0].message.content == first.text
        answer = chat(own, messages=turns, logprobs=True)
    found = [entry.logprob for entry in answer.choices[0].logprobs.content]
    assert found == list(expected.logprobs)


def test_the_last_message_can_be_continued(client: openai.OpenAI, engine: Engine) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "Well, "}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    answer = chat(client, messages=begun, extra_body=more)
    ids = engine.chat_ids(begun, continue_final_message=True)
    expected = engine.submit(ids, 12, temperature=1.0, seed=1).result(SECONDS)
    assert answer.choices[0].message.content == expected.text


def test_sampling_that_was_set_is_the_default(engine: Engine) -> None:
    with running_server(lambda: engine, sampling=SamplingParams(temperature=0.25, top_k=5)) as running:
        own = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
        assert chat(own).choices[0].message.content == engine_answer(engine, temperature=0.25, top_k=5).text
        assert chat(own, temperature=0).choices[0].message.content == engine_answer(engine, temperature=0).text


WRONG_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("temperature", {"temperature": -1}, "temperature"),
    ("temperature as text", {"temperature": "hot"}, "temperature"),
    ("top_p", {"top_p": 2}, "top_p"),
    ("n", {"n": 0}, "n"),
    ("too many answers", {"n": 5}, "n"),
    ("max_tokens", {"max_tokens": 0}, "max_tokens"),
    ("stop", {"stop": [""]}, "stop"),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("top_logprobs alone", {"top_logprobs": 2}, "top_logprobs"),
    ("no messages", {"messages": []}, "messages"),
    ("role", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("no content", {"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        "image",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    ("audio", {"audio": {"voice": "x"}}, "audio"),
    ("functions", {"functions": [{"name": "f"}]}, "functions"),
    ("response format", {"response_format": {"type": "xml"}}, "response_format"),
    ("schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ("two grammars", {"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ("tool choice", {"tool_choice": "maybe"}, "tool_choice"),
    ("chat_template", {"chat_template": "{{ x }}"}, "chat_template"),
    ("a template inside", {"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs"),
    ("logit_bias", {"logit_bias": {"x": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("fields", "named"), [pytest.param(*one[1:], id=one[0]) for one in WRONG_FIELDS])
def test_a_wrong_field_is_refused_by_name(running: Running, fields: dict[str, Any], named: str) -> None:
    with running.client() as http:
        response = http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 2, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert named in (error["param"] or error["message"])
    assert named.partition("[")[0] in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "service_tier": "auto", "modalities": ["text"], "functions": [], "audio": None},
        {"user": "me", "metadata": {"a": "b"}, "logit_bias": {}, "stop": None, "tools": [], "seed": None},
        {"response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True},
    ],
)
def test_known_fields_with_values_without_effect_pass(running: Running, fields: dict[str, Any]) -> None:
    with running.client() as http:
        response = http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 2, **fields})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers


def test_unknown_fields_are_named_and_refused_if_asked(running: Running, engine: Engine) -> None:
    body = {"messages": ASKED, "max_tokens": 2, "zebra": 1, "model": "gpt-4o"}
    with running.client() as http:
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        assert response.headers["x-ignored-fields"] == "zebra"
        names = {"": 1, " \u00fc,\n": 2, "x" * 9000: 3}
        response = http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 2, **names})
        assert response.headers["x-ignored-fields"] == '"", " \\u00fc,\\n", ' + "x" * 60
        assert response.json()["model"] == "tiny"
    with running_server(lambda: engine, strict=True) as strict, strict.client() as http:
        response = http.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "zebra")
        del body["zebra"]
        assert http.post("/v1/chat/completions", json=body).status_code == 404


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_texts_and_conversations_are_tokenized(running: Running, engine: Engine) -> None:
    with running.client() as http:
        ids = http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
        assert ids == engine.tokenizer.encode("Hello")
        assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello"}
        assert http.post("/tokenize", json={"messages": ASKED}).json()["tokens"] == engine.chat_ids(ASKED)
        assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
        named = {"bos_token": None, "eos_token": "<|end|>", "pad_token": None, "chat_template": TEMPLATE}
        assert http.get("/tokenizer_info").json() == named
        plan = http.get("/plan").json()
        assert plan["weight_bytes"] == engine.plan.weight_nbytes
        assert http.get("/version").json()["version"]


def test_metrics_count_requests_and_tokens(engine: Engine) -> None:
    with running_server(lambda: engine, metric_aliases="vllm") as own, own.client() as http:
        body = {"messages": ASKED, "max_tokens": 5, "ignore_eos": True}
        for _ in range(2):
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert float(lines['graphcore_requests_total{endpoint="/v1/chat/completions",status="200"}']) == 2
    prompt = len(engine.chat_ids(ASKED))
    assert float(lines["graphcore_prompt_tokens_total"]) == 2 * prompt == float(lines["vllm:prompt_tokens_total"])
    assert float(lines["vllm:time_to_first_token_seconds_count"]) == 2
    assert float(lines["graphcore_requests_running"]) == 0
    assert float(lines["graphcore_weight_bytes"]) == engine.plan.weight_nbytes


def test_many_clients_at_once_get_the_answers_that_they_get_alone(client: openai.OpenAI) -> None:
    texts = [[{"role": "user", "content": "x" * at}] for at in range(1, 13)]
    alone = [chat(client, messages=text, temperature=0).choices[0].message.content for text in texts]
    found: list[str] = [""] * len(texts)

    def ask(at: int) -> None:
        for chunk in chat(client, messages=texts[at], temperature=0, stream=True):
            found[at] += chunk.choices[0].delta.content or ""

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == alone


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(client, messages=[{"role": "user", "content": "x" * 600}])


def test_errors_name_no_path(running: Running, folder: Path) -> None:
    with running.client() as http:
        text = http.post("/v1/completions", json={"prompt": "\u00e9\u4e2d", "max_tokens": 2}).text
        assert str(folder.parent) not in text
        for path in ("/v1/models", "/plan", "/metrics", "/version"):
            assert str(folder.parent) not in http.get(path).text


def test_probabilities_of_the_answer_are_numbers(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=3, logprobs=0)
    found = answer.choices[0].logprobs
    assert all(math.isfinite(value) for value in found.token_logprobs)
    assert found.top_logprobs is None


def test_an_unknown_path_is_404_and_another_method_405(running: Running) -> None:
    with running.client() as http:
        assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        for path in ("/api/chat", "/api/generate", "/chat/completions"):  # ollama's, and an address without /v1
            said = http.post(path, json={}).json()["error"]["message"]
            assert f"POST {path}: there is no such path" in said
            assert all(f"/v1/{one}" in said for one in ("chat/completions", "completions", "responses", "messages"))
        assert http.get("/v1/chat/completions").status_code == 405
        assert isinstance(http.get("/health"), httpx.Response)


def curl_lines() -> list[str]:
    """Return the commands of docs/serving.md and README.md that ask a server."""
    pages = [ROOT / "docs" / "serving.md", ROOT / "README.md"]
    blocks = [block for page in pages for block in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL)]
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [line for line in lines if line.startswith("curl ")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("line", curl_lines())
def test_documented_curl_lines_work_as_printed(running: Running, line: str) -> None:
    command = line.replace("http://127.0.0.1:8000", running.url).replace("curl ", "curl -sS --fail-with-body ", 1)
    found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert '"error":{' not in found.stdout.partition('"content"')[0]


def test_metrics_of_streamed_weights_grow(folder: Path) -> None:
    sizes = [*SIZES, "streaming.memory_budget=17MiB"]
    with (
        Engine.load(folder, dtype="fp32", device="cpu", streaming="on", overrides=sizes) as engine,
        running_server(lambda: engine) as own,
        own.client() as http,
    ):
        moved = []
        for _ in range(2):
            assert http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 8}).status_code == 200
            lines = http.get("/metrics").text.splitlines()
            moved += [float(line.split()[1]) for line in lines if line.startswith("graphcore_streamed_bytes_total")]
        assert 0 < moved[0] < moved[1]
        assert engine.plan.is_streaming
