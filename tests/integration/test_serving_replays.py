"""Requests as Open WebUI, Continue, Cline, LangChain, LiteLLM, Codex and Claude Code send them, written by hand.

They have fields that no specification has, nulls, parts in place of texts, tools that are not called and headers of
their own. Each gets an answer with the text of the model, or with a valid call.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.chat_folders import BRIEF, TOKEN_IDS, save_calling_folder
from support.serving import Running, running_server

from graphcore import Engine
from graphcore.sampling_params import SamplingParams

SIZES = ["batching.max_sequences=4", "context_length=4096"]
SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string", "maxLength": 12}, "limit": {"enum": [5, 10, None]}},
    "required": ["query"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
TOOL = {"type": "function", "function": {"name": "search_files", "description": "Search.", "parameters": SEARCH}}
PAST_CALL = {"id": "call_1", "type": "function", "function": {"name": "search_files", "arguments": '{"query": "x"}'}}
QUESTION = {"role": "user", "content": "What does this do?"}
PARTS = {
    "role": "user",
    "content": [
        {"type": "text", "text": "<task>\nMend the bug.\n</task>"},
        {"type": "text", "text": "<environment_details>\n# Time\n12:00\n</environment_details>"},
    ],
}
STAINLESS = {"x-stainless-lang": "js", "x-stainless-retry-count": "0", "user-agent": "OpenAI/JS 6.49.0"}


@dataclass(frozen=True)
class Replay:
    """A request of a client.

    Attributes:
        client: name of the client, and of what it asks for.
        body: body of the request.
        path: path of the request.
        headers: headers that the client adds.
        ignored: fields that the answer names as ignored.
    """

    client: str
    body: dict[str, Any]
    path: str = "/v1/chat/completions"
    headers: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


REPLAYS = [
    Replay(
        "open-webui-chat",
        {
            "stream": True,
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "Today is Monday."},
                QUESTION,
                {"role": "assistant", "content": "Nothing.", "id": "0c1d", "timestamp": 1764000000, "done": True},
                {"role": "user", "content": [{"type": "text", "text": "And this?"}]},
            ],
            "stream_options": {"include_usage": True},
            "max_tokens": 24,
            "params": {},
            "features": {"web_search": False, "memory": False},
            "variables": {"{{USER_NAME}}": "someone"},
            "session_id": "u7",
            "chat_id": "local:1",
            "id": "31f2",
            "background_tasks": {"title_generation": True},
            "tool_servers": [],
            "model_item": {"id": "tiny", "info": {"meta": {"capabilities": {}}}},
        },
        headers={"x-openwebui-user-name": "someone", "x-openwebui-chat-id": "local:1", "accept": "*/*"},
        ignored=(
            *("params", "features", "variables", "session_id", "chat_id", "id"),
            *("background_tasks", "tool_servers", "model_item"),
        ),
    ),
    Replay(
        "open-webui-title",
        {
            "model": "tiny",
            "messages": [QUESTION],
            "stream": False,
            "max_completion_tokens": 24,
            "metadata": {"task": "title_generation", "chat_id": "1", "user_id": "2", "filter_ids": []},
        },
    ),
    Replay(
        "continue-chat",
        {
            "messages": [{"role": "system", "content": ""}, PARTS, {"role": "assistant", "content": " "}, QUESTION],
            "model": "tiny",
            "max_tokens": 24,
            "temperature": 0.5,
            "top_p": None,
            "frequency_penalty": None,
            "presence_penalty": None,
            "stop": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [TOOL],
            "parallel_tool_calls": False,
            "prediction": None,
        },
        headers={"api-key": "none", **STAINLESS},
    ),
    Replay(
        "continue-autocomplete",
        {
            "prompt": "<fim_prefix>def add(a, b):\n    <fim_suffix>\n<fim_middle>",
            "model": "tiny",
            "max_tokens": 24,
            "temperature": 0.01,
            "stop": ["<fim_prefix>", "\n\n", "/src/", "#- coding: utf-8"],
            "stream": True,
            "raw": True,
        },
        path="/v1/completions",
        headers={"x-api-key": "none"},
        ignored=("raw",),
    ),
    Replay(
        "cline-task",
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "You are Cline."}, PARTS],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 24,
            "reasoning_effort": "medium",
            "tool_choice": "auto",
            "tools": None,
            "provider": {"sort": "price"},
        },
        headers={"http-referer": "https://cline.bot", "x-title": "Cline", **STAINLESS},
        ignored=("provider",),
    ),
    Replay(
        "cline-calls",
        {
            "model": "tiny",
            "messages": [
                PARTS,
                {"role": "assistant", "content": "", "tool_calls": [PAST_CALL], "reasoning_details": []},
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "No results"}]},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 400,
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    Replay(
        "langchain-chat",
        {
            "model": "tiny",
            "messages": [{"content": "Be brief.", "role": "system"}, {**QUESTION, "name": "ada"}],
            "max_completion_tokens": 24,
            "temperature": 0.0,
            "n": 1,
            "top_p": 0.9,
            "seed": 7,
            "stream": False,
            "logprobs": None,
            "tool_choice": "auto",
        },
    ),
    Replay(
        "langchain-agent",
        {
            "model": "tiny",
            "messages": [
                QUESTION,
                {"content": None, "role": "assistant", "tool_calls": [PAST_CALL]},
                {"content": '["a.py"]', "role": "tool", "tool_call_id": "call_1"},
            ],
            "max_completion_tokens": 400,
            "tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "search_files"}},
            "parallel_tool_calls": False,
            "stream": False,
        },
    ),
    Replay(
        "langchain-structured",
        {
            "model": "tiny",
            "messages": [QUESTION],
            "max_completion_tokens": 200,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "Search", "description": "A search.", "strict": True, "schema": SEARCH},
            },
        },
    ),
    Replay(
        "litellm-nulls",
        {
            "model": "openai/tiny",
            "messages": [{"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}}],
            **dict.fromkeys(("max_tokens", "max_completion_tokens", "n", "stop", "seed", "tools", "tool_choice")),
            **dict.fromkeys(("response_format", "logit_bias", "user", "functions", "function_call", "modalities")),
            **dict.fromkeys(("stream", "stream_options", "logprobs", "top_logprobs", "parallel_tool_calls")),
            "extra_headers": None,
        },
    ),
    Replay(
        "codex-turn",
        {
            "model": "tiny",
            "instructions": "You are a coding agent.",
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List files."}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
                {
                    "type": "function_call",
                    "name": "search_files",
                    "arguments": '{"query":"x"}',
                    "call_id": "call_1",
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
            ],
            "tools": [
                {"type": "function", **TOOL["function"], "strict": False},
                {"type": "local_shell"},
                {"type": "web_search", "external_web_access": False},
                {
                    "type": "custom",
                    "name": "apply_patch",
                    "description": "Edit files.",
                    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
                },
                {
                    "type": "namespace",
                    "name": "mcp__files__",
                    "description": "Files.",
                    "tools": [{"type": "function", **TOOL["function"], "strict": False}],
                },
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199",
            "client_metadata": {"x-codex-installation-id": "7"},
            "text": {"verbosity": "low"},
        },
        path="/v1/responses",
        headers={"originator": "codex_cli_rs", "session_id": "0199", "accept": "text/event-stream"},
        ignored=(
            *("client_metadata", "include.reasoning.encrypted_content"),
            *("tools.local_shell", "tools.web_search", "tools.custom", "tools.namespace"),
            "input.reasoning.encrypted_content",
        ),
    ),
    Replay(
        "codex-compacted",
        {
            "model": "tiny",
            "instructions": "You are a coding agent.",
            "input": [
                {"type": "compaction", "encrypted_content": "gAAAA"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look at a.png."}]},
                {"type": "local_shell_call", "call_id": "call_0", "status": "completed", "action": {"type": "exec"}},
                {"type": "function_call_output", "call_id": "call_0", "output": "a.png"},
                {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
                {"type": "function_call", "name": "view_image", "arguments": "", "call_id": "call_1"},
                {
                    "type": "function_call_output",
                    "call_id": "call_1",
                    "output": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}],
                },
                {"type": "function_call", "name": "search_files", "arguments": '{"query": "x', "call_id": "call_2"},
                {"type": "function_call_output", "call_id": "call_2", "output": "failed to parse arguments"},
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<approvals>"}]},
            ],
            "tools": [{"type": "function", **TOOL["function"], "parameters": {"type": "object", "required": None}}],
            "stream": True,
        },
        path="/v1/responses",
        ignored=(
            *("input.compaction", "input.local_shell_call", "input.web_search_call"),
            "input.function_call_output.input_image",
        ),
    ),
    Replay(
        "claude-code-turn",
        {
            "model": "claude-sonnet",
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b;"},
                {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<system-reminder>\n</system-reminder>"},
                        {"type": "text", "text": "List files.", "cache_control": {"type": "ephemeral"}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "", "signature": "unsigned"},
                        {"type": "tool_use", "id": "toolu_1", "name": "search_files", "input": {"query": "x"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"tool_use_id": "toolu_1", "type": "tool_result", "content": "a.py", "is_error": False},
                        {"type": "text", "text": "And now?"},
                    ],
                },
            ],
            "tools": [{"name": "search_files", "description": "Search.", "input_schema": SEARCH, "eager": True}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "metadata": {"user_id": "user_1"},
            "max_tokens": 400,
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "medium"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        },
        path="/v1/messages?beta=true",
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14", **STAINLESS},
        ignored=("context_management",),
    ),
    Replay(
        "claude-code-picture",
        {
            "model": "claude-sonnet",
            "system": "x-anthropic-billing-header: cc_version=2; cch=1a2b;\nYou are Claude Code.",
            "messages": [
                {"role": "user", "content": "Look at a.png and a.txt."},
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "toolu_1", "name": "search_files", "input": ""},
                        {"type": "tool_use", "id": "toolu_2", "name": "search_files", "input": {"query": "a.txt"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "tool_use_id": "toolu_1",
                            "type": "tool_result",
                            "content": [
                                {
                                    "type": "image",
                                    "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
                                }
                            ],
                        },
                        {
                            "tool_use_id": "toolu_2",
                            "type": "tool_result",
                            "content": [
                                {
                                    "type": "document",
                                    "title": "a.txt",
                                    "source": {"type": "text", "media_type": "text/plain", "data": "text"},
                                }
                            ],
                        },
                    ],
                },
            ],
            "tools": [
                {"name": "mcp__" + "x" * 100, "input_schema": {"type": "object", "properties": None}},
                {"name": "search_files", "description": "Search.", "input_schema": {**SEARCH, "$defs": None}},
            ],
            "tool_choice": {"type": "tool", "name": "search_files", "disable_parallel_tool_use": True},
            "max_tokens": 400,
            "stream": True,
        },
        path="/v1/messages?beta=true",
        ignored=("messages.tool_result.image",),
    ),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose random model ends its answers soon, but not at once."""
    folder = save_calling_folder(tmp_path_factory.mktemp("replays") / "model")
    sampling = SamplingParams(logit_bias={**BRIEF, TOKEN_IDS["<|im_end|>"]: 3.0}, min_tokens=6)
    with (
        Engine.load(folder, dtype="fp32", device="cpu", overrides=SIZES) as engine,
        running_server(lambda: engine, sampling=sampling) as running,
    ):
        yield running


@pytest.mark.parametrize("replay", REPLAYS, ids=[replay.client for replay in REPLAYS])
def test_a_request_of_a_client_is_answered(running: Running, replay: Replay) -> None:
    with running.client(authorization="Bearer sk-none", **replay.headers) as http:
        response = http.post(replay.path, json=replay.body)
    assert response.status_code == 200, response.text
    ignored = [name for name in response.headers.get("x-ignored-fields", "").split(", ") if name]
    assert sorted(ignored) == sorted(replay.ignored)
    if replay.path.startswith("/v1/messages"):
        check_message_events(events_of(response.text))
    elif replay.path == "/v1/responses":
        check_response_events(events_of(response.text))
    elif replay.body.get("stream"):
        check_chunks(events_of(response.text), replay)
    else:
        (choice,) = response.json()["choices"]
        check_answer(replay, choice["message"]["content"], choice["message"].get("tool_calls"))


def test_a_strict_server_refuses_tools_that_are_left_out_elsewhere(running: Running) -> None:
    (turn,) = [replay.body for replay in REPLAYS if replay.client == "codex-turn"]
    known = {name: value for name, value in turn.items() if name not in ("client_metadata", "include")}
    with running_server(lambda: running.served.engine, strict=True) as strict, strict.client() as http:
        refused = http.post("/v1/responses", json=known)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools.local_shell")
        read = [item for item in turn["input"] if item["type"] != "reasoning"]
        functions = {**known, "tools": turn["tools"][:1], "input": read}
        refused = http.post("/v1/responses", json={**functions, "include": turn["include"]})
        assert refused.json()["error"]["param"] == "include.reasoning.encrypted_content"
        assert http.post("/v1/responses", json={**functions, "max_output_tokens": 4}).status_code == 200
        refused = http.post("/v1/responses", json={**functions, "input": turn["input"]})
        assert refused.json()["error"]["param"] == "input.reasoning.encrypted_content"


GUARD = (
    "{%- for message in messages %}{%- if message.role not in ('system', 'user', 'assistant', 'tool') or "
    "(message.role == 'system' and not loop.first) or (loop.index0 > 0 and message.role == 'user' and "
    "messages[loop.index0 - 1].role in ('user', 'tool')) %}{{ raise_exception('Not so.') }}{% endif %}{% endfor %}"
)


def test_all_interfaces_put_a_conversation_into_the_same_turns(tmp_path: Path) -> None:
    """The template refuses a second system message and two turns of a user, as Qwen 3.5's and Mistral's do."""
    folder = save_calling_folder(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    guarded = {**config, "chat_template": GUARD + config["chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(guarded))
    said = {"role": "assistant", "content": "Well."}
    use = {"id": "c1", "type": "function", "function": {"name": "search_files", "arguments": "{}"}}
    system, late = {"role": "system", "content": "Be kind."}, {"role": "system", "content": "Be brief."}
    chat = [
        *(system, {"role": "developer", "content": "In English."}, QUESTION, late, said, late, QUESTION),
        {"role": "assistant", "content": None, "tool_calls": [use]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        QUESTION,
    ]
    turns = [
        {"role": "system", "content": "Be kind.\n\nIn English."},
        {"role": "user", "content": QUESTION["content"] + "\n\nBe brief."},
        said,
        {"role": "user", "content": "Be brief.\n\n" + QUESTION["content"]},
        {"role": "assistant", "content": "", "tool_calls": [{**use, "function": {**use["function"], "arguments": {}}}]},
        {"role": "tool", "name": "search_files", "content": "a.py\n\n" + QUESTION["content"]},
    ]
    items = [
        *chat[1:7],
        {"type": "function_call", "call_id": "c1", "name": "search_files", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        QUESTION,
    ]
    blocks = [
        *chat[2:7],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "search_files", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a.py"}]},
        QUESTION,
    ]
    systems = [{"type": "text", "text": text} for text in ("Be kind.", "In English.")]
    with Engine.load(folder, dtype="fp32", device="cpu", overrides=SIZES) as engine:
        expected = engine.chat_ids(turns)
        assert engine.chat_ids([{**chat[0], "content": "Be kind."}, *chat[1:7]])[:80] == expected[:80]
        with running_server(lambda: engine) as running, running.client() as http:
            assert http.post("/tokenize", json={"messages": chat}).json()["tokens"] == expected
            asked = {"messages": chat, "max_tokens": 1}
            assert http.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"] == len(expected)
            response = http.post(
                "/v1/responses", json={"instructions": "Be kind.", "input": items, "max_output_tokens": 1}
            )
            assert response.json()["usage"]["input_tokens"] == len(expected)
            assert response.json()["usage"]["input_tokens_details"]["cached_tokens"] >= len(expected) - 16
            counted = http.post("/v1/messages/count_tokens", json={"system": systems, "messages": blocks})
            assert counted.json() == {"input_tokens": len(expected)}
            refused = http.post("/v1/chat/completions", json={"messages": [QUESTION, {**said, "role": "wizard"}]})
            assert refused.status_code == 400


def events_of(text: str) -> list[Any]:
    """Return the data of server-sent events; their names must be the data's types, if they have names."""
    found: list[Any] = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        found.append(lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"]))
        assert "event" not in lines or lines["event"] == found[-1]["type"]
    return found


def check_answer(replay: Replay, content: str | None, calls: Any) -> None:
    """Check that an answer has what the request wants: a call, an object of a schema, or text."""
    if replay.body.get("tool_choice") not in (None, "auto"):
        (call,) = calls
        jsonschema.validate(json.loads(call["function"]["arguments"]), SEARCH)
    elif replay.body.get("response_format"):
        jsonschema.validate(json.loads(content or ""), SEARCH)
    else:
        assert content


def check_chunks(events: list[Any], replay: Replay) -> None:
    """Check the chunks of a stream as clients put them together."""
    *chunks, done = events
    assert done == "[DONE]"
    if replay.body.get("stream_options"):
        usage = chunks.pop()
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] > usage["usage"]["completion_tokens"] > 0
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [choices[-1]["finish_reason"]]
    if replay.path == "/v1/completions":
        assert "".join(choice["text"] for choice in choices)
        return
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant"
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    arguments = "".join(piece["function"].get("arguments", "") for piece in pieces)
    calls = [{"function": {"arguments": arguments}}] if pieces else None
    check_answer(replay, "".join(delta.get("content") or "" for delta in deltas), calls)


def check_response_events(events: list[Any]) -> None:
    """Check the events that Codex reads."""
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert done[0]["content"][0]["text"]
    assert events[-1]["response"]["usage"]["total_tokens"] > 0


def check_message_events(events: list[Any]) -> None:
    """Check the events that Claude Code reads."""
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2], kinds[-1]) == ("message_start", "message_delta", "message_stop")
    (block,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert (block["type"], block["name"]) == ("tool_use", "search_files")
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    jsonschema.validate(json.loads("".join(pieces)), SEARCH)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_the_models_are_listed_for_a_client_that_asks_first(running: Running) -> None:
    """Open WebUI and others show what this lists, and send its id back."""
    with running.client(authorization="Bearer sk-none", **{"x-openwebui-user-id": "1"}) as http:
        (model,) = http.get("/v1/models").json()["data"]
        assert http.get(f"/v1/models/{model['id']}").json() == model
        body = {"model": model["id"], "messages": [QUESTION], "max_tokens": 8}
        assert http.post("/v1/chat/completions", json=body).json()["model"] == model["id"]


def test_langchain_embeds_texts_and_token_ids(running: Running) -> None:
    """Its class for OpenAI sends token ids, and sends texts with `check_embedding_ctx_length=False`."""
    engine = running.served.engine
    ids = [engine.tokenizer.encode(text) for text in ("one", "two words")]
    bodies: list[Any] = [["one", "two words"], ids]
    with running.client() as http:
        found = [
            http.post("/v1/embeddings", json={"input": body, "model": "tiny", "encoding_format": "float"}).json()
            for body in bodies
        ]
    expected = engine.embed(["one", "two words"]).numpy()
    for answer in found:
        assert [one["embedding"] for one in answer["data"]] == [pytest.approx(row, abs=1e-6) for row in expected]
