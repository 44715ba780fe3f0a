"""A server among careless and hostile clients: keys, websites, sizes, slow connections, full queues, the end."""

import json
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
from graphcore.errors import ConfigError, GraphError
from graphcore.serving.event_streams import CLIENT_LEFT
from graphcore.serving.guard import DEEPEST, OPEN_PATHS, is_loopback
from graphcore.serving.served_model import ServingState

LONG = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"prompt": "abc", "max_tokens": 2}


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("limits") / "llama3"
    shutil.copytree(tiny_model("llama3").folder, path)
    add_tokenizer(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    sizes = ["batching.max_sequences=2", "context_length=4096", "batching.max_waiting=1", "batching.cache_tokens=8192"]
    with Engine.load(folder, dtype="fp32", device="cpu", overrides=sizes) as engine:
        yield engine


def test_every_path_but_two_needs_the_key(engine: Engine) -> None:
    with running_server(lambda: engine, api_key="open sesame") as running, running.client() as http:
        paths = ["/v1/models", "/metrics", "/plan", "/version", "/v1/models/tiny", "/tokenizer_info"]
        posts = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"]
        posts += ["/v1/messages/count_tokens", "/tokenize", "/detokenize"]
        assert {http.get(path).status_code for path in paths} == {401}
        assert {http.post(path, json={}).status_code for path in posts} == {401}
        assert {http.get(path).status_code for path in OPEN_PATHS} == {200}
        for headers in (
            {"x-api-key": "open"},
            {"authorization": "Bearer open sesam"},
            {"authorization": "open sesame"},
        ):
            assert http.get("/v1/models", headers=headers).status_code == 401
        for headers in ({"x-api-key": "open sesame"}, {"authorization": "bearer open sesame"}):
            assert http.get("/v1/models", headers=headers).status_code == 200


def test_a_key_is_never_logged(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with running_server(lambda: engine, api_key="open sesame") as running, running.client() as http:
        http.get("/v1/models", headers={"x-api-key": "open sesame"})
        http.get("/v1/models", headers={"x-api-key": "another secret"})
    assert "sesame" not in caplog.text
    assert "another secret" not in caplog.text


FRAMED = (
    ("navigate iframe cross-site", 403),
    ("navigate document cross-site", 200),
    ("navigate document none", 200),
    ("cors empty same-origin", 200),
    ("no-cors script same-origin", 200),
)


def test_websites_and_other_names_of_this_machine_are_refused(engine: Engine) -> None:
    with running_server(lambda: engine, allowed_hosts=["llm.example.org"]) as running, running.client() as http:
        own = running.url.removeprefix("http://")
        refused: list[dict[str, str]] = [
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"host": "evil.example"},
            {"host": "evil.example:80", "origin": "http://evil.example:80"},
        ]
        for headers in refused:
            assert http.get("/v1/models", headers=headers).status_code == 403, headers
        for headers in ({"origin": f"http://{own}"}, {"host": "llm.example.org"}, {"host": "localhost:1"}):
            assert http.get("/v1/models", headers=headers).status_code == 200, headers
        for kind, code in (("no-cors image cross-site", 403), ("no-cors script same-site", 403), *FRAMED):
            mode, destination, site = kind.split()
            sent = {"sec-fetch-mode": mode, "sec-fetch-dest": destination, "sec-fetch-site": site}
            for path in ("/v1/models", "/plan", "/"):
                assert http.get(path, headers=sent).status_code == code, (kind, path)
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            response = http.post("/v1/completions", content=json.dumps(SHORT), headers={"content-type": kind})
            assert response.status_code == 415


def test_a_website_may_ask_if_it_is_named(engine: Engine) -> None:
    page = "http://localhost:3000"
    with running_server(lambda: engine, cors_origins=[f"{page}/"]) as running, running.client(origin=page) as http:
        response = http.post("/v1/completions", json=SHORT)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == page
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        assert http.options("/v1/completions", headers=asked).status_code == 200
    with running_server(lambda: engine) as running, running.client() as http:
        assert "access-control-allow-origin" not in http.get("/v1/models").headers


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[1]", 400),
        (b'"text"', 400),
        (b"{", 400),
        (b'{"prompt": NaN}', 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b"[" * 4000, 400),
        (b'{"a":' * (DEEPEST + 1) + b"1" + b"}" * (DEEPEST + 1), 400),
        (b'{"prompt": "' + b"x" * 5000 + b'"}', 413),
        (b'{"prompt": 5}', 400),
        (b'{"prompt": [[]]}', 400),
        (b'{"prompt": [1000000]}', 400),
        (b'{"prompt": [-1]}', 400),
        (b'{"prompt": [true]}', 400),
        (b'{"prompt": "a", "max_tokens": 1e400}', 400),
        (b'{"prompt": "a", "seed": 123456789012345678901234567890}', 200),
    ],
)
def test_bodies_that_are_no_requests_are_refused(running: Running, body: bytes, status: int) -> None:
    with running.client() as http:
        response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == status, response.text
        assert http.post("/v1/completions", json=SHORT).status_code == 200


@pytest.fixture
def running(engine: Engine) -> Iterator[Running]:
    with running_server(lambda: engine, max_body_bytes=5000, receive_timeout=0.5, send_timeout=0.5) as running:
        yield running


def test_a_body_without_a_length_is_cut_too(running: Running) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    with running.client() as http:
        response = http.post("/v1/completions", content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_small_pieces_do_not_wait_for_the_client_to_confirm_earlier_ones(running: Running) -> None:
    """Otherwise each answer after the first of a connection, and each piece of a stream, comes 40 ms late."""
    with connect(running) as connection:
        connection.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        (protocol,) = running.server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def connect(running: Running) -> socket.socket:
    host, _, port = running.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=SECONDS)
    connection.settimeout(SECONDS)
    return connection


def request_of(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {len(text)}", "", ""]).encode() + text


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_head_that_does_not_come_is_cut(running: Running, sent: bytes) -> None:
    began = time.monotonic()
    with connect(running) as connection:
        connection.sendall(sent)
        assert connection.recv(1000) == b""
    assert 0.3 < time.monotonic() - began < 10


def test_a_head_that_drips_is_cut_and_a_second_request_may_follow_an_answer(running: Running) -> None:
    with connect(running) as connection:
        for _ in range(2):
            connection.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1000)
            assert b"200 OK" in answer
        with pytest.raises(OSError, match=r".*"):  # noqa: PT012 - it is cut while it drips
            for _ in range(100):
                connection.sendall(b"G")
                time.sleep(0.05)
                if connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"":
                    raise ConnectionResetError


def test_a_body_that_does_not_come_is_refused(running: Running) -> None:
    with connect(running) as connection:
        connection.sendall(request_of(SHORT)[:-5])
        assert b" 408 " in connection.recv(1000).split(b"\r\n")[0]


def test_a_client_that_leaves_ends_its_request(running: Running) -> None:
    for extra in ({}, {"stream": True}):
        connection = connect(running)
        connection.sendall(request_of({**LONG, **extra}))
        running.wait_for(lambda: running.num_requests() == 1)
        if extra:
            assert b"data:" in connection.recv(4000) + connection.recv(4000)
        connection.close()
        running.wait_for(lambda: running.num_requests() == 0, seconds=5)
    running.wait_for(lambda: running.served.num_running == 0, seconds=5)


@pytest.mark.thorough
def test_a_client_that_does_not_read_is_cut(running: Running) -> None:
    connection = connect(running)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.sendall(request_of({**LONG, "stream": True, "logprobs": 20}))
    running.wait_for(lambda: running.num_requests() == 1)
    running.wait_for(lambda: running.num_requests() == 0, seconds=30)
    with running.client() as http:
        name = f'graphcore_requests_total{{endpoint="/v1/completions",status="{CLIENT_LEFT}"}} 1.0'
        running.wait_for(lambda: name in http.get("/metrics").text, seconds=5)
    connection.close()


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def test_others_are_served_beside_many_slow_connections(running: Running) -> None:
    slow = [connect(running) for _ in range(200)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
    with running.client() as http:
        assert http.post("/v1/completions", json=SHORT).status_code == 200
    for connection in slow:
        assert receive(connection) == b""
        connection.close()


@pytest.mark.thorough
def test_a_full_queue_is_429_and_says_when_to_come_back(running: Running) -> None:
    done = threading.Event()

    def ask() -> None:
        with running.client() as http, http.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
            done.wait(SECONDS)  # leaving ends the answer

    threads = [threading.Thread(target=ask) for _ in range(3)]
    try:
        for at, thread in enumerate(threads, start=1):  # two run, one waits
            thread.start()
            running.wait_for(lambda at=at: running.num_requests() == at and running.num_decoding() == min(at, 2))
        with running.client() as http:
            response = http.post("/v1/completions", json=SHORT)
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert response.json()["error"]["code"] == "queue_full"
            assert http.get("/health").status_code == 200
    finally:
        done.set()
        for thread in threads:
            thread.join(SECONDS)


def test_a_request_ends_at_its_time_limit(engine: Engine) -> None:
    with running_server(lambda: engine, request_timeout=0.3) as running, running.client() as http:
        answer = http.post("/v1/completions", json=LONG).json()
    assert 0 < answer["usage"]["completion_tokens"] < 4000
    assert answer["choices"][0]["finish_reason"] == "length"


def test_limits_of_prompts_and_answers_hold(engine: Engine) -> None:
    with running_server(lambda: engine, max_prompt_tokens=5, max_new_tokens=7) as running, running.client() as http:
        assert http.post("/v1/completions", json={**SHORT, "prompt": "abcdef"}).status_code == 400
        assert http.post("/v1/completions", json=LONG).json()["usage"]["completion_tokens"] == 7


def test_a_server_that_loads_says_so_and_refuses(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="graphcore.serving")
    go = threading.Event()

    def load() -> Engine:
        go.wait(SECONDS)
        return engine

    with running_server(load, waits=False) as running, running.client() as http:
        assert http.get("/health").json() == {"status": "loading"}
        assert http.get("/health").status_code == 503
        assert http.get("/ping").status_code == 200
        assert http.get("/metrics").status_code == 200
        response = http.post("/v1/completions", json=SHORT)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        paths = [getattr(record, "facts", {}).get("path") for record in caplog.records]
        assert paths == ["/v1/completions"]  # who polls /health until the model is there fills no log
        go.set()
        running.wait_for(lambda: http.get("/health").status_code == 200)
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_running_answers_finish_and_no_others_begin_when_it_ends(engine: Engine) -> None:
    with running_server(lambda: engine, grace=60) as running, running.client() as http:
        found: list[Any] = []

        def ask() -> None:
            with running.client() as own:
                found.append(own.post("/v1/completions", json={**LONG, "max_tokens": 1500}))

        thread = threading.Thread(target=ask)
        thread.start()
        running.wait_for(lambda: running.num_requests() == 1)
        running.server.handle_exit(15, None)
        running.wait_for(lambda: running.served.state is ServingState.DRAINING)
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json=SHORT).status_code == 503
        thread.join(SECONDS)
        running.thread.join(SECONDS)
        assert not running.thread.is_alive()
    assert found[0].json()["usage"]["completion_tokens"] == 1500


def fail_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine's next pass fail for good, as after a lost disk."""

    def lost(*_: object) -> None:
        raise GraphError("the disk is gone")

    monkeypatch.setattr(engine.batching, "run", lost)
    monkeypatch.setattr(engine._queue, "_check_usable", lost)


def test_a_failed_engine_is_rebuilt_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(folder, dtype="fp32", device="cpu") as engine, running_server(lambda: engine) as running:
        with running.client() as http:
            assert http.post("/v1/completions", json=SHORT).status_code == 200
            fail_passes(engine, monkeypatch)
            assert http.post("/v1/completions", json=SHORT).status_code == 503
            running.wait_for(lambda: http.get("/health").status_code == 200)
            assert http.post("/v1/completions", json=SHORT).status_code == 200
            fail_passes(engine, monkeypatch)
            assert http.post("/v1/completions", json=SHORT).status_code == 503
        running.thread.join(SECONDS)
        assert not running.thread.is_alive()
        assert running.served.state is ServingState.FAILED
        assert isinstance(running.served.failure, GraphError)


@pytest.mark.thorough
def test_a_pass_that_does_not_end_is_said_until_it_does(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk or a device that does not answer holds the pass; /health, /status and /metrics say so meanwhile."""
    go, run = threading.Event(), engine.batching.run

    def hung(*arguments: Any) -> None:
        assert go.wait(SECONDS)
        run(*arguments)

    with running_server(lambda: engine, pass_timeout=0.2) as running, running.client() as http:
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        assert (http.get("/health").status_code, running.served.is_stalled) == (200, False)
        monkeypatch.setattr(engine.batching, "run", hung)
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=SHORT).status_code))
        thread.start()
        with running.client() as other:
            running.wait_for(lambda: other.get("/health").status_code == 503)
            assert other.get("/health").json() == {"status": "stalled"}
            status = other.get("/status").json()
            assert (status["state"], len(status["requests"]), status["failure"]) == ("stalled", 1, None)
            metrics = dict(line.split() for line in other.get("/metrics").text.splitlines() if line[0] != "#")
            assert float(metrics["graphcore_pass_seconds"]) > 0.2
            assert float(metrics["graphcore_ready"]) == 0
            running.wait_for(lambda: "a pass has not ended for 0.2 s (task.pass_timeout)" in caplog.text)
            go.set()
            thread.join(SECONDS)
            assert answers == [200]
            running.wait_for(lambda: other.get("/health").status_code == 200)
            running.wait_for(lambda: "the pass that took longer than 0.2 s has ended" in caplog.text)
            assert float(other.get("/status").json()["pass_seconds"]) == 0
    assert caplog.text.count("has not ended") == 1


def test_a_failed_engine_says_so_in_its_status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is any error, such as that of a disk, and the server is asked while it is loaded again."""
    go = threading.Event()

    def lost(*_: object) -> None:
        raise OSError(5, "the disk is gone", "/models/m.gguf")

    with Engine.load(folder, dtype="fp32", device="cpu") as engine, running_server(lambda: engine) as running:
        rebuild = engine.rebuild
        monkeypatch.setattr(engine, "rebuild", lambda: go.wait(SECONDS) and rebuild())
        monkeypatch.setattr(engine.batching, "run", lost)
        monkeypatch.setattr(engine._queue, "_check_usable", lost)
        with running.client() as http:
            try:
                assert http.get("/status").json()["failure"] is None
                assert http.post("/v1/completions", json=SHORT).status_code == 503
                status = http.get("/status").json()
                assert status["failure"] == "[Errno 5] the disk is gone: 'm.gguf'"
                assert (status["state"], status["requests"]) == ("rebuilding", [])
                assert "graphcore_ready 0.0" in http.get("/metrics").text
            finally:
                go.set()
            running.wait_for(lambda: http.get("/health").status_code == 200)
            assert http.get("/status").json()["failure"] is None


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> Engine:
        raise ConfigError("no such model")

    with running_server(load, waits=False) as running:
        running.thread.join(SECONDS)
        assert not running.thread.is_alive()
    assert str(running.served.failure) == "no such model"


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
)
def test_loopback_addresses_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
