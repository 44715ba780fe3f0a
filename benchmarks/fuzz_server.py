"""Sends malformed requests to a server of task=serve: each must get an answer, none of them 500, and others are served.

graphcore serve task.port=8201 context_length=2048                      beside it, best with a small model
python benchmarks/fuzz_server.py http://127.0.0.1:8201 --cases 10000
python benchmarks/fuzz_server.py http://127.0.0.1:8201 --case 1234      one case, with its answer

A finding is a status of 500, an answer that is neither JSON nor events, no answer, or a server that serves no more.
Exit status 1 if there is one.
"""

import argparse
import http.client
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

SECONDS = 10.0  # for an answer; the client then leaves, which is no finding: mutations ask for long answers, too
PATIENCE = 60.0  # seconds for all requests to end after the last case
FAILED = b"failed inside the server"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "x", "parameters": SCHEMA}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello?"}]},
    {"role": "assistant", "content": "Yes.", "tool_calls": None},
]
CALLED = [
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "a"}'}}]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hello?"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "a"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hello?"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
    {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "rain"},
]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "stop_token_ids": [7],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": False,
    "n": 2,
    "stream_options": {"include_usage": True},
}
GRAMMARS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"regex": "[ab]+"},
    {"grammar": 'start: "a" | start "b"'},
    {"grammar": 'root ::= "a" | root "b"'},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"guided_json": SCHEMA},
]
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 3, "model": "x"}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, **SAMPLING, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**CHAT, **TOOLS, "reasoning_effort": "low", "parallel_tool_calls": True}),
    ("/v1/chat/completions", {**CHAT, "messages": [*MESSAGES, *CALLED], **TOOLS, "tool_choice": "auto"}),
    *(("/v1/chat/completions", {**CHAT, **grammar}) for grammar in GRAMMARS),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 2, **SAMPLING}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "suffix": "", "best_of": 1}),
    *(("/v1/completions", {"prompt": "a", "max_tokens": 2, **grammar}) for grammar in GRAMMARS),
    (
        "/v1/responses",
        {
            "input": ITEMS,
            "instructions": "x",
            "max_output_tokens": 3,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
        },
    ),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "pooling": "mean", "dimensions": None}),
    (
        "/v1/messages",
        {
            "messages": BLOCKS,
            "max_tokens": 3,
            "system": [{"type": "text", "text": "x"}],
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 100},
            "stop_sequences": ["x"],
            "output_config": {"effort": "low"},
            "metadata": {"user_id": "x"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": BLOCKS, "system": "x"}),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [5, 6]}),
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    20,
    2**63,
    -(2**100),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\ud800",
    "\U0001f600\x00\n",
    "x" * 5000,
    "<|im_end|><think><tool_call>",
    [],
    {},
    [[]],
    [None],
    ["a", 1],
    [{"type": "text"}],
    {"type": "function"},
    {"$ref": "#"},
    {"a": {"b": [{}]}},
]
BYTES = [b"", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\x00", b"\xff", b"null", b"1e400", b"-", b"\\ud800"]
HEADERS = [
    "Host: x",
    "Host: [",
    "Origin: http://x",
    "Content-Type: text/plain",
    "Content-Length: 5",
    "Content-Length: -1",
    "Transfer-Encoding: chunked",
    "Expect: 100-continue",
    "X-Request-ID: \x7f",
    "Authorization: Bearer",
    "x-api-key: \xff",
    "Connection: upgrade",
    "Accept-Encoding: gzip",
]


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of each value inside of a JSON value, as keys and indices."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [found for key in keys for found in [(*place, key), *places(value[key], (*place, key))]]


def mutated(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return a body with some values replaced, left out or added."""
    found: dict[str, Any] = json.loads(json.dumps(body))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        chosen = draw.choice(places(found) or [("x",)])
        holder: Any = found
        for key in chosen[:-1]:
            holder = holder[key]
        match draw.randrange(6):
            case 0 if chosen[-1] in holder or isinstance(holder, list):
                del holder[chosen[-1]]
            case 1 if isinstance(holder, dict):
                holder[draw.choice([*SAMPLING, "tools", "stream", "echo", "zebra", "\ud800"])] = deepcopy(
                    draw.choice(VALUES)
                )
            case 2:
                path, other = draw.choice(SEEDS)
                holder[chosen[-1]] = deepcopy(draw.choice([path, *other.values()]))
            case _:
                holder[chosen[-1]] = deepcopy(draw.choice(VALUES))
    return found


def request_of(number: int) -> tuple[str, str, list[str], bytes]:
    """Return method, path, headers and body of a case."""
    draw = random.Random(number)
    path, body = draw.choice(SEEDS)
    if draw.random() < 0.3:
        body = {**body, "stream": True}
    text = json.dumps(mutated(body, draw)).encode()
    method, headers = "POST", ["Content-Type: application/json"]
    match draw.randrange(10):
        case 0:
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(BYTES) + text[at + draw.randrange(3) :]
        case 1:
            text = text[: draw.randrange(len(text))]
        case 2:
            headers += draw.sample(HEADERS, draw.randrange(1, 3))
        case 3:
            method = draw.choice(["GET", "HEAD", "PUT", "OPTIONS", "FOO"])
        case 4:
            path = draw.choice([path + "/", "/" + path, path + "?a=%ff", "/v1/models/" + "x" * 300, "/%00", "*"])
    return method, path, headers, text


class FuzzedServer:
    """A server under test.

    Args:
        url: its address.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80

    def answer(self, number: int) -> tuple[str, str]:
        """Return the outcome of a case: a status or "left", and what is wrong with it, if anything is."""
        method, path, headers, body = request_of(number)
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        try:
            connection.putrequest(method, path, skip_host=any(one.startswith("Host") for one in headers))
            for header in [*headers, f"Content-Length: {len(body)}"]:
                connection.putheader(*header.encode("latin-1").split(b": ", 1))
            connection.endheaders(body)
            response = connection.getresponse()
            found = response.read()
        except TimeoutError:
            return "left", ""
        except (OSError, http.client.HTTPException) as error:
            is_expected = len(headers) > 1  # two lengths end a connection
            return "cut", "" if is_expected else f"no answer: {error!r}"
        finally:
            connection.close()
        return str(response.status), problem_of(response, found, method)

    def post(self, path: str, body: dict[str, Any]) -> int:
        """Return the status of a request that is in order."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse().status

    def num_running(self) -> int:
        """Return the number of requests that run or wait."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        names = ("graphcore_requests_running ", "graphcore_requests_waiting ")
        return sum(int(float(line.split()[1])) for line in lines if line.startswith(names))


def problem_of(response: http.client.HTTPResponse, body: bytes, method: str) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    if response.status >= 500 or FAILED in body:
        return f"{response.status}: {body[:200]!r}"
    kind = response.headers.get("Content-Type", "")
    if method == "HEAD" or "text/plain" in kind:
        return ""
    try:
        if "event-stream" in kind:
            events = [line for line in body.decode().split("\n") if line.startswith("data: {")]
            return "" if all(map(json.loads, (event[6:] for event in events))) else "an event is empty"
        found = json.loads(body)
    except ValueError as error:
        return f"not readable: {error}: {body[:200]!r}"
    if response.status >= 400 and not isinstance(found.get("error", {}).get("message"), str):
        return f"no error object: {body[:200]!r}"
    return ""


def main() -> int:
    """Run the cases, and print outcomes and findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int)
    given = parser.parse_args()
    server = FuzzedServer(given.url)
    if given.case is not None:
        print(request_of(given.case), server.answer(given.case), sep="\n")
        return 0
    counts, findings = Counter[str](), list[str]()
    with ThreadPoolExecutor(8) as threads:
        numbers = range(given.first, given.first + given.cases)
        for number, (outcome, problem) in zip(numbers, threads.map(server.answer, numbers), strict=True):
            counts[outcome] += 1
            if problem:
                findings.append(f"case {number}: {problem}")
                print(findings[-1], flush=True)
    end = time.monotonic() + PATIENCE
    while server.num_running() and time.monotonic() < end:
        time.sleep(0.5)
    left, status = server.num_running(), server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    print(dict(counts), f"{len(findings)} findings, {left} requests left, then status {status}")
    return 1 if findings or left or status != 200 else 0


if __name__ == "__main__":
    sys.exit(main())
