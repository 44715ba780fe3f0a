"""A server in a thread of the test's process, requests to each of its endpoints, and what answers say."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from omegaconf import OmegaConf
from tokenizers import Tokenizer, processors

from graphcore import Engine
from graphcore.config.conf_folder import conf_dir
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.sampling_defaults import SamplingDefaults
from graphcore.sampling_params import NEUTRAL, SamplingParams
from graphcore.serving.http_server import DrainingServer, new_served
from graphcore.serving.listener import bound_socket
from graphcore.serving.serve_settings import ServeSettings
from graphcore.serving.served_model import ServedModel
from support.chat_folders import BYTE_IDS, CONTROLS, MESSAGES, TOKEN_IDS, TOOLS, save_calling_folder

# A server in a thread of the test's process, on a free port.

SECONDS = 60.0


def serve_settings(**keys: Any) -> ServeSettings:
    """Return the settings of conf/task/serve.yaml with other values of some keys."""
    stated = OmegaConf.to_container(OmegaConf.load(conf_dir() / "task" / "serve.yaml"))
    assert isinstance(stated, dict)
    return ServeSettings(**{**{str(key): value for key, value in stated.items()}, "port": 0, **keys})


@dataclass
class Running:
    """A server that runs.

    Attributes:
        url: its address.
        served: its model.
        server: the server itself.
        thread: the thread that it runs in.
    """

    url: str
    served: ServedModel
    server: DrainingServer
    thread: threading.Thread

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=SECONDS)

    def wait_for(self, is_true: Callable[[], bool], seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.005)

    def num_requests(self) -> int:
        """Return the number of requests that the engine has."""
        engine = self.served.loaded_engine
        return 0 if engine is None else len(engine.status())

    def num_decoding(self) -> int:
        """Return the number of requests that have a row of the KV cache."""
        engine = self.served.loaded_engine
        return 0 if engine is None else sum(one.is_running for one in engine.status())


@contextmanager
def running_server(
    load: Callable[[], Engine],
    waits: bool = True,
    sampling: SamplingParams | None = None,
    has_own_sampling: bool = False,
    **keys: Any,
) -> Iterator[Running]:
    """Run a server; at the end its engine is closed, unless the test's own fixture keeps it.

    Args:
        load: function that loads the engine.
        waits: True to wait until it is ready.
        sampling: parameters of requests that set none; None is a temperature of 1.
        has_own_sampling: True to leave these to the model.
        keys: keys of the task.
    """
    settings = serve_settings(**keys)
    given = {name: value for name, value in vars(sampling or SamplingParams()).items() if value != NEUTRAL.get(name)}

    before: list[tuple[LoadedModel, SamplingDefaults]] = []

    def load_and_set() -> Engine:
        engine = load()
        if has_own_sampling:
            return engine
        before.append((engine.loaded, engine.loaded.sampling))
        engine.loaded.sampling = SamplingDefaults({"temperature": 1.0, **given}, "the test")
        return engine

    served, server = new_served("tiny", settings, load_and_set)
    listener = bound_socket(settings.host, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # else the kernel takes megabytes for slow readers
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", served, server, thread)
    try:
        running.wait_for(lambda: server.started and (not waits or served.state.value != "loading"))
        yield running
    finally:
        server.should_exit = server.force_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive(), "the server has not ended"
        for loaded, own in before:  # of an engine that other servers of a test file have, too
            loaded.sampling = own


# Requests to every endpoint of a server, and what answers say, in one form for all interfaces.

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, MESSAGES_PATH, COUNT = "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
NUM_TOKENS = 12
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": NUM_TOKENS, "seed": 1},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": NUM_TOKENS, "seed": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": NUM_TOKENS, "seed": 1},
    EMBEDDINGS: {"input": "Hi there"},
    MESSAGES_PATH: {"messages": HELLO, "max_tokens": NUM_TOKENS},
    COUNT: {"messages": HELLO},
    TOKENIZE: {"prompt": "Hi"},
    DETOKENIZE: {"tokens": [BYTE_IDS["H"], BYTE_IDS["i"]]},
}
"""The least that each endpoint answers, short and with a seed."""

PRINTABLE = {token for character, token in BYTE_IDS.items() if " " < character < "\x7f"}
DEFAULT_BIAS = {
    **{token: -100.0 for token in (*TOKEN_IDS.values(), *BYTE_IDS.values()) if token not in PRINTABLE},
    TOKEN_IDS["<tool_call>"]: -50.0,
}
"""A `logit_bias` for answers of printable characters that never end by themselves, and calls that others follow."""

TURN = (
    "{%- if reasoning_effort is defined %}<|im_start|>system\nEffort: {{ reasoning_effort }}<|im_end|>\n{% endif %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}<think>\n"
    "{%- if not enable_thinking %}\n\n</think>\n\n{% endif %}{% endif %}{% endif %}"
)


def save_asked_folder(folder: Path) -> Path:
    """Write a checkpoint folder and return it: its template knows tools, efforts and thoughts, and texts begin."""
    save_calling_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = CONTROLS[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, TOKEN_IDS[begin])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": CONTROLS[0], "bos_token": begin, "chat_template": TOOLS + MESSAGES + TURN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Answered:
    """What an answer says.

    Attributes:
        body: the whole body.
        texts: texts of the answers.
        thoughts: text of the first answer's thinking.
        calls: name and arguments of each call.
        reason: why the first answer ended.
        new_tokens: tokens of all answers.
        prompt_tokens: tokens of the prompt.
        ignored: names in X-Ignored-Fields.
    """

    body: Any
    texts: tuple[str, ...] = ()
    thoughts: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reason: str | None = None
    new_tokens: int = 0
    prompt_tokens: int = 0
    ignored: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def content(self) -> Any:
        """What two answers to one question have in common, without ids and times."""
        if self.texts:
            return self.texts, self.thoughts, self.calls, self.reason, self.new_tokens, self.prompt_tokens
        return self.body


@dataclass(frozen=True)
class Ask:
    """An endpoint of a server.

    Attributes:
        http: the server's client.
        path: path of the endpoint.
    """

    http: httpx.Client
    path: str

    def send(self, fields: dict[str, Any]) -> httpx.Response:
        """Send the endpoint's body with other values of some fields; one that is ... is left out."""
        body = {name: value for name, value in {**BODIES[self.path], **fields}.items() if value is not ...}
        return self.http.post(self.path, json=body)

    def __call__(self, **fields: Any) -> Answered:
        response = self.send(fields)
        assert response.status_code == 200, (fields, response.text)
        names = tuple(name for name in response.headers.get("x-ignored-fields", "").split(", ") if name)
        return Answered(body=response.json(), ignored=names, **answer_of(self.path, response.json()))

    def refused(self, **fields: Any) -> str:
        """Return the name of the field that the server refuses; Anthropic's errors have it in the message alone."""
        response = self.send(fields)
        assert response.status_code == 400, (fields, response.text)
        error = response.json()["error"]
        return str(error["param"] if "param" in error else error["message"].split()[0].partition("=")[0].rstrip(":"))

    def events(self, **fields: Any) -> list[Any]:
        """Return the data of a stream's events, without [DONE]."""
        response = self.send({**fields, "stream": True})
        assert response.status_code == 200, (fields, response.text)
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]


def answer_of(path: str, body: Any) -> dict[str, Any]:
    """Return the fields of `Answered` that a body has."""
    readers = {CHAT: _chat, COMPLETIONS: _completion, RESPONSES: _response, MESSAGES_PATH: _message}
    return readers[path](body) if path in readers else {}


def _chat(body: Any) -> dict[str, Any]:
    message = body["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "texts": tuple(choice["message"]["content"] or "" for choice in body["choices"]),
        "thoughts": message.get("reasoning_content", ""),
        "calls": tuple((call["name"], call["arguments"]) for call in calls),
        "reason": body["choices"][0]["finish_reason"],
        "new_tokens": body["usage"]["completion_tokens"],
        "prompt_tokens": body["usage"]["prompt_tokens"],
    }


def _completion(body: Any) -> dict[str, Any]:
    return {
        "texts": tuple(choice["text"] for choice in body["choices"]),
        "reason": body["choices"][0]["finish_reason"],
        "new_tokens": body["usage"]["completion_tokens"],
        "prompt_tokens": body["usage"]["prompt_tokens"],
    }


def _response(body: Any) -> dict[str, Any]:
    items = body["output"]
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    thoughts = [part for item in items if item["type"] == "reasoning" for part in item.get("content", ())]
    calls = [item for item in items if item["type"] == "function_call"]
    return {
        "texts": ("".join(part["text"] for part in parts),),
        "thoughts": "".join(part["text"] for part in thoughts),
        "calls": tuple((call["name"], call["arguments"]) for call in calls),
        "reason": "stop" if body["status"] == "completed" else "length",
        "new_tokens": body["usage"]["output_tokens"],
        "prompt_tokens": body["usage"]["input_tokens"],
    }


def _message(body: Any) -> dict[str, Any]:
    blocks, usage = body["content"], body["usage"]
    return {
        "texts": ("".join(block["text"] for block in blocks if block["type"] == "text"),),
        "thoughts": "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "calls": tuple((block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"),
        "reason": body["stop_reason"],
        "new_tokens": usage["output_tokens"],
        "prompt_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"],
    }
