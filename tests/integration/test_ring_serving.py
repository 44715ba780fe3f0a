"""A ring that torchrun starts: its server, a rank that is lost, and Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from ring_ranks import free_ports
from support.chat_folders import save_chat_folder
from support.processes import environment
from support.tiny_models import BUILDERS, add_tokenizer

from graphcore import Engine
from graphcore.memory_limit import physical_ram_nbytes

pytestmark = pytest.mark.thorough

RUN = Path(__file__).parents[2] / "run.py"
SECONDS = 60.0
MESSAGES = [{"role": "user", "content": "hello"}]


class Torchrun:
    """torchrun with two ranks of the command line.

    Attributes:
        process: torchrun.
        output, errors: files of its output.
    """

    def __init__(self, folder: Path, restarts: int, *arguments: str) -> None:
        self.output, self.errors = folder / "output.txt", folder / "errors.txt"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            str(restarts),
        ]
        command += ["--monitor-interval", "0.1", "--master-port", str(free_ports(1)[0]), str(RUN), *arguments]
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, "parallel=ring", "threads=1", "dtype=fp32", "device=cpu"],
                cwd=folder,
                env=environment(),
                stdout=output,
                stderr=errors,
            )

    def pid_of(self, rank: int) -> int:
        """Return the process id of a rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = (int(one) for one in children if f"RANK={rank}".encode() in variables_of(one))
        return found


def variables_of(pid: str) -> Sequence[bytes]:
    """Return the environment variables of a process; none if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return ()


@contextmanager
def torchrun(folder: Path, *arguments: str, restarts: int = 0) -> Iterator[Torchrun]:
    """Run two ranks inside the block, which are started again so many times."""
    running = Torchrun(folder, restarts, *arguments)
    try:
        yield running
    finally:
        running.process.send_signal(signal.SIGINT)
        try:
            running.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            running.process.kill()


def wait_for(is_true: Callable[[], bool], running: Torchrun) -> None:
    """Wait until something is true."""
    end = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < end, running.errors.read_text()
        time.sleep(0.02)


def answer_of(http: httpx.Client) -> str:
    """Return the answer to the messages."""
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    found = http.post("/v1/chat/completions", json=body)
    text: str = found.json()["choices"][0]["message"]["content"]
    return text


def status_of(http: httpx.Client) -> int:
    """Return the status of /health; 0 if nobody listens."""
    try:
        return http.get("/health").status_code
    except httpx.TransportError:
        return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model."""
    return save_chat_folder(tmp_path_factory.mktemp("ring") / "chat")


def test_a_server_on_a_ring_answers_fails_with_its_rank_and_is_started_again(folder: Path, tmp_path: Path) -> None:
    with Engine.load(folder, dtype="fp32", device="cpu") as engine:
        ids = engine.chat_ids(MESSAGES)
        expected = engine.generate([ids], 20)[0].text
    port = free_ports(1)[0]
    serving = f"model.checkpoint={folder}", "task=serve", f"task.port={port}", "outputs=false", "streaming=on"
    url = f"http://127.0.0.1:{port}"
    with torchrun(tmp_path, *serving, restarts=1) as running, httpx.Client(base_url=url, timeout=SECONDS) as http:
        wait_for(lambda: status_of(http) == 200, running)
        first = running.pid_of(0)
        assert answer_of(http) == expected
        check_ring(http.get("/status").json()["ring"])
        plan = http.get("/plan").json()
        assert plan["groups"]
        assert re.fullmatch(r"[\d,-]+ of rank 0 of 2", plan["share"])
        assert 0 < plan["smallest_budget_bytes"] <= plan["memory"]["total_bytes"]
        assert plan["memory_bytes"] < 0.6 * physical_ram_nbytes()
        refused = http.get("/plan", params={"memory_budget": "1GB"})
        assert refused.status_code == 400
        assert "use task=plan parallel=ring" in refused.json()["error"]["message"]
        found: list[httpx.Response] = []
        body = {"prompt": "hello", "max_tokens": 3000, "ignore_eos": True}
        asking = threading.Thread(target=lambda: found.append(http.post("/v1/completions", json=body)))
        asking.start()
        wait_for(lambda: bool(http.get("/status").json()["requests"]), running)
        os.kill(running.pid_of(1), signal.SIGKILL)
        asking.join(SECONDS)
        assert found[0].status_code == 503
        assert "\n" not in found[0].json()["error"]["message"]
        assert status_of(http) in (0, 503)
        wait_for(lambda: status_of(http) == 200, running)
        assert running.pid_of(0) != first
        assert answer_of(http) == expected
        other = running.pid_of(1)
        os.kill(other, signal.SIGINT)
        time.sleep(0.2)
        assert answer_of(http) == expected
        os.kill(other, signal.SIGINT)
        wait_for(lambda: not variables_of(str(other)), running)
        said = running.errors.read_text()
        assert "the engine has failed, and the server ends: rank 0 of 2: " in said
        assert "loaded again" not in said


def check_ring(found: dict[str, Any]) -> None:
    """Check what /status says of two ranks that stream a layer each."""
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert [one["layers"] for one in found["ranks"]] == [1, 1]
    assert all(one["streamed_bytes"] > 10_000 for one in found["ranks"])
    parts = [one["part_seconds"] for one in found["ranks"]]
    assert all(0 < part < found["pass_seconds"] for part in parts)
    assert found["hand_over_share"] == pytest.approx(max(0, 1 - sum(parts) / found["pass_seconds"]))


@pytest.mark.thorough
def test_ctrl_c_ends_an_answer_on_a_ring_as_in_one_process(tmp_path: Path) -> None:
    model = tmp_path / "long"
    BUILDERS["llama3"](max_position_embeddings=4096).save_pretrained(model)
    add_tokenizer(model)
    asked = "prompt=hello", "max_new_tokens=3900", "repetition_detection=false", "hydra.run.dir=run"
    with torchrun(tmp_path, f"model.checkpoint={model}", *asked) as running:
        wait_for(lambda: len(running.output.read_text()) > 20, running)
        os.kill(running.pid_of(1), signal.SIGINT)  # Ctrl-C in a terminal reaches all ranks, in any order
        time.sleep(0.1)
        os.kill(running.pid_of(0), signal.SIGINT)
        wait_for((tmp_path / "run" / "result.json").exists, running)
        record = json.loads((tmp_path / "run" / "result.json").read_text())
        assert record["status"] == "interrupted"
        assert 5 < len(record["generations"][0]["token_ids"]) < 3900
        wait_for(lambda: "exitcode: 130" in running.errors.read_text(), running)
        assert "ParallelError" not in running.errors.read_text()
