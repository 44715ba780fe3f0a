"""Several engines behind one address: `graphcore serve task.replicas=2`, in a network of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIError, OpenAI
from support.chat_folders import save_chat_folder
from support.processes import ROOT, environment, own_network

from graphcore import Engine

pytest.importorskip("ray", reason="Ray is an extra: pip install 'graphcore[ray]'")
pytestmark = pytest.mark.slow
SECONDS = 120
NUM_REQUESTS, NUM_CLIENTS = 200, 8
SETTINGS = (
    "device=cpu",
    "graph=eager",
    "threads=1",
    "task=serve",
    "task.port=0",
    "task.max_sequences=4",
    "task.log=json",
)
OPTIONS: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@dataclass
class Cluster:
    """A server with replicas.

    Attributes:
        lines: what it has printed on standard error.
    """

    process: subprocess.Popen[str]
    url: str
    folder: Path
    lines: list[str]

    def replica_pids(self) -> list[int]:
        """Return the process ids of replicas that are loaded or load."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if "ServeReplica:graphcore:Replica" in " ".join(child.cmdline())]

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=SECONDS, **options)

    def wait_for_line(self, text: str) -> str:
        """Return a line with a text; Ray passes on what replicas write after a while."""
        end = time.monotonic() + SECONDS
        while not (found := [line for line in self.lines if text in line]):
            assert time.monotonic() < end, f"no line has {text}"
            time.sleep(0.1)
        return found[0]

    def wait_for_replicas(self, number: int) -> None:
        end = time.monotonic() + SECONDS
        while httpx.get(f"{self.url}/health", timeout=SECONDS).json()["replicas"] != {"RUNNING": number}:
            assert time.monotonic() < end, "the replicas do not run"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("replicas")
    model = save_chat_folder(folder / "model")
    arguments = (*SETTINGS, f"model.checkpoint={model}", "task.replicas=2", "hydra.run.dir=run")
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    with own_network():
        variables = {**environment(), "RAY_TMPDIR": "/tmp"}  # paths of its sockets must be short
        process = subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                break
        else:
            pytest.fail("".join(lines))
        reading = threading.Thread(target=lines.extend, args=(process.stderr,))
        reading.start()
        try:
            yield Cluster(process, found[0], folder, lines)
        finally:
            process.terminate()
            try:
                process.wait(SECONDS)
            finally:
                process.kill()
                reading.join()


def test_every_replica_answers_as_the_engine_does(cluster: Cluster) -> None:
    expected = Engine.load(cluster.folder / "model", graph="eager").generate(
        [{"role": "user", "content": "Hello"}], max_new_tokens=24, ignore_eos=True
    )
    found: dict[str, str] = {}
    with cluster.client() as client:
        for turn in range(40):
            messages: Any = (
                [{"role": "user", "content": "Hello"}] if turn % 2 else [{"role": "user", "content": "?" * turn}]
            )
            answer = client.chat.completions.with_raw_response.create(
                model="any", messages=messages, max_tokens=24, **OPTIONS
            )
            if turn % 2:
                found[answer.headers["x-replica"]] = answer.parse().choices[0].message.content or ""
    assert set(found.values()) == {expected[0].text}


def test_a_chat_stays_with_its_replica_and_other_chats_go_to_the_other(cluster: Cluster) -> None:
    replicas = []
    with cluster.client() as client:
        for chat in range(2):
            messages: Any = [{"role": "user", "content": f"chat {chat}"}]
            known = 0
            for turn in range(5):
                raw = client.chat.completions.with_raw_response.create(
                    model="any", messages=messages, max_tokens=8, **OPTIONS
                )
                answer = raw.parse()
                replicas.append(raw.headers["x-replica"])
                usage = answer.usage
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                assert (usage.prompt_tokens_details.cached_tokens or 0) >= known, "the cache of the last turn"
                known = usage.total_tokens - 1
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
                messages += [{"role": "user", "content": f"turn {turn}"}]
    assert [len(set(replicas[:5])), len(set(replicas[5:]))] == [1, 1]
    assert replicas[0] != replicas[5]


def test_status_is_that_of_one_replica_and_metrics_are_those_of_all(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=SECONDS) as http:
        asked = ("/status", "/plan", "/status", "/plan?memory_budget=1GB")
        assert len({http.get(path).headers["x-replica"] for path in asked}) == 1
        text = http.get("/metrics").text
        assert len(set(re.findall(r'graphcore_ready\{replica="(\w+)"\} 1\.0', text))) == 2
        assert text.count("# TYPE graphcore_ready gauge") == 1
        assert http.get("/ping").json() == {"status": "alive"}
        assert http.post("/ping", json={}).status_code == 405
        foreign = {"Origin": "https://example.org"}
        assert [http.get(path, headers=foreign).status_code for path in ("/health", "/ping", "/metrics")] == [403] * 3
        large = http.post("/v1/completions", content=b"{" * 100, headers={**foreign, "content-length": "100"})
        assert large.status_code == 403, "whose body is not read"
        assert "<html" in http.get("/").text
        assert http.get("/v1/models").json()["data"][0]["object"] == "model"
        refused = http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert http.get("/nothing").status_code == 404
        asked = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine"})
        assert asked.headers.get_list("x-request-id") == ["mine"]
    line = cluster.wait_for_line('"request_id": "mine"')
    assert json.loads(line[line.index("{") :])["replica"] == asked.headers["x-replica"]


def test_a_client_that_leaves_frees_its_place(cluster: Cluster) -> None:
    body = {"prompt": "a", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=SECONDS) as stream:
        next(stream.iter_lines())
    end = time.monotonic() + SECONDS
    while "graphcore_requests_running" not in (text := httpx.get(f"{cluster.url}/metrics").text) or re.search(
        r"graphcore_requests_running\{.*\} [1-9]", text
    ):
        assert time.monotonic() < end, "the request still runs"


def test_no_request_is_lost_with_a_replica_and_no_stream_goes_on_with_another_answer(cluster: Cluster) -> None:
    """One of two is killed under load, while a stream runs on each: one ends with an error, one with its answer."""
    cluster.wait_for_replicas(2)
    before = set(cluster.replica_pids())
    assert len(before) == 2
    whole: Any = {"model": "any", "max_tokens": 32, **OPTIONS}
    with cluster.client() as client, ThreadPoolExecutor(NUM_CLIENTS + 2) as pool:
        long = {**whole, "max_tokens": 3900}
        expected: dict[str, tuple[str, str]] = {}  # a prompt and its text, by the replica that has its beginning
        for number in range(20):
            prompt = f"stream {number}"
            raw = client.completions.with_raw_response.create(prompt=prompt, **long)
            expected[raw.headers["x-replica"]] = prompt, raw.parse().choices[0].text
            if len(expected) == 2:
                break
        has_begun = threading.Barrier(3)

        def stream(prompt: str) -> tuple[str, Exception | None]:
            text = ""
            try:
                pieces = client.completions.create(prompt=prompt, stream=True, **long)
                for number, piece in enumerate(pieces):
                    text += piece.choices[0].text if piece.choices else ""
                    if number == 2:
                        has_begun.wait(SECONDS)
            except APIError as error:
                return text, error
            return text, None

        def ask(number: int) -> int:
            usage = client.completions.create(prompt=f"request {number}", **whole).usage
            assert usage is not None
            return usage.completion_tokens

        streams = [pool.submit(stream, prompt) for prompt, _ in expected.values()]
        has_begun.wait(SECONDS)
        answers = [pool.submit(ask, number) for number in range(NUM_REQUESTS)]
        while sum(answer.done() for answer in answers) < NUM_REQUESTS // 20:
            time.sleep(0.01)
        os.kill(before.pop(), signal.SIGKILL)
        assert [answer.result(SECONDS) for answer in answers] == [32] * NUM_REQUESTS
        ends = [one.result(SECONDS) for one in streams]
    assert sum(error is not None for _, error in ends) == 1, "each replica had one of the streams"
    for (text, error), (_, whole_text) in zip(ends, expected.values(), strict=True):
        assert whole_text.startswith(text), "text of another answer"
        assert (text == whole_text) == (error is None)
        assert error is None or "has died" in str(error)
    cluster.wait_for_replicas(2)
    assert len(cluster.replica_pids()) == 2


def test_a_signal_lets_answers_end(cluster: Cluster) -> None:
    """The last test of the server: a stream that runs when SIGTERM comes is answered to its end."""
    with cluster.client(max_retries=0) as client:
        pieces = client.completions.create(
            model="any", prompt="end", max_tokens=600, stream=True, stream_options={"include_usage": True}, **OPTIONS
        )
        first = next(iter(pieces))
        cluster.process.send_signal(signal.SIGTERM)
        rest = list(pieces)
    assert first.choices
    assert rest[-1].usage is not None
    assert rest[-1].usage.completion_tokens == 600
    assert cluster.process.wait(SECONDS) == 0
    record = json.loads((cluster.folder / "run" / "result.json").read_text())
    assert (record["status"], record["replica_resources"]["num_cpus"]) == ("ok", 1)
    assert record["num_requests"] > NUM_REQUESTS
    ours = [line for line in cluster.lines if not line.startswith("(ProxyActor")]  # Ray's proxy logs clients that leave
    assert "Traceback" not in "".join(ours)
