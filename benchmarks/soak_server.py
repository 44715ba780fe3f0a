"""Holds a server of task=serve under load for minutes, with clients of which a third leave early.

python benchmarks/soak_server.py --clients 64 --seconds 600 -- task.max_sequences=16
python benchmarks/soak_server.py --clients 64 --seconds 600 -- streaming=auto limits.memory=400MiB

What follows `--` are settings of the server, which the script starts and ends itself. Prints a line every half minute.
A finding is an answer that fails, pages of the KV cache that nobody gives back, memory that grows, an answer that
SIGTERM cuts, and another exit status than 0. Exit status 1 if there is one.
"""

import argparse
import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 300.0  # seconds for the server to start, and for an answer
INTERVAL = 30.0  # seconds between two looks at the server's memory
GROWTH = 0.05  # share by which memory may grow from the first third of the time to the last
LEAVING = 1 / 3  # share of the requests whose client leaves
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass
class Soaked:
    """What the clients saw.

    Attributes:
        outcomes: number of answers by outcome.
        findings: what is wrong, in words.
        memory: resident bytes of the server at each look.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def request_of(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request."""
    words = " ".join(draw.choices(["red", "blue", "seven", "house", "walk", "tree", "cold"], k=draw.randrange(1, 150)))
    chat = {"messages": [{"role": "user", "content": words}], "max_tokens": draw.randrange(1, 80)}
    stream = {"stream": draw.random() < 0.8}
    match draw.randrange(7):
        case 0:
            return "/v1/completions", {"prompt": words, "max_tokens": draw.randrange(1, 80), "n": 2, **stream}
        case 1:
            return "/v1/messages", {**chat, **stream}
        case 2:
            return "/v1/responses", {"input": words, "max_output_tokens": draw.randrange(1, 80), **stream}
        case 3:
            bound = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
            return "/v1/chat/completions", {**chat, **stream, "response_format": bound}
        case 4:
            return "/v1/embeddings", {"input": [words, words[:50]]}
        case _:
            return "/v1/chat/completions", {**chat, **stream, "logprobs": draw.random() < 0.3}


async def ask(client: httpx.AsyncClient, draw: random.Random, found: Soaked) -> None:
    """Send a request, and read its answer or leave."""
    path, body = request_of(draw)
    stays = draw.random() > LEAVING
    try:
        async with asyncio.timeout(None if stays else draw.random() * 3), client.stream("POST", path, json=body) as got:
            text = (await got.aread()).decode()
    except TimeoutError:
        found.outcomes["left"] += 1
        return
    except httpx.HTTPError as error:
        found.outcomes["failed"] += 1
        found.findings.append(f"{path}: {error!r}")
        return
    found.outcomes[str(got.status_code)] += 1
    if got.status_code not in (200, 429) or "inside the server" in text or '"error":{' in text:
        found.findings.append(f"{path}: {got.status_code} {text[-300:]}")
    elif got.status_code == 429:
        await asyncio.sleep(float(got.headers["Retry-After"]))


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """Return the value of one of the server's metrics; a name with several labels is summed."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))


def resident_bytes(pid: int) -> int:
    """Return the memory of a process that is in RAM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


async def watch(client: httpx.AsyncClient, pid: int, found: Soaked) -> None:
    """Note the server's memory, and print it."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL)
        found.memory.append(resident_bytes(pid))
        pages = await metric(client, "graphcore_kv_cache_pages")
        print(
            f"{time.monotonic() - began:.0f} s: {found.memory[-1] >> 20} MiB, {pages:.0f} pages, "
            f"{await metric(client, 'graphcore_requests_running'):.0f} running, "
            f"{await metric(client, 'graphcore_requests_waiting'):.0f} waiting, {dict(found.outcomes)}",
            flush=True,
        )


async def soak(url: str, server: subprocess.Popen[bytes], clients: int, seconds: float) -> Soaked:
    """Run the clients, then end the server while it answers, and return what was seen."""
    found, end = Soaked(), time.monotonic() + seconds

    async def ask_until_end(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end and len(found.findings) < 100:
            await ask(client, draw, found)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        await started(client, server)
        watching = asyncio.create_task(watch(client, server.pid, found))
        await asyncio.gather(*map(ask_until_end, range(clients)))
        watching.cancel()
        await asyncio.sleep(2)
        for name in ("graphcore_requests_running", "graphcore_requests_waiting", "graphcore_kv_cache_pages"):
            if left := await metric(client, name):
                found.findings.append(f"{name} is {left:.0f} after the last answer")
        await end_while_answering(client, server, found)
    third = len(found.memory) // 3
    if third and max(found.memory[-third:]) > (1 + GROWTH) * max(found.memory[:third]):
        found.findings.append(f"memory grew: {[one >> 20 for one in found.memory]} MiB")
    return found


async def started(client: httpx.AsyncClient, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server takes requests."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and server.poll() is None:
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.ConnectError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the server does not start")


async def end_while_answering(client: httpx.AsyncClient, server: subprocess.Popen[bytes], found: Soaked) -> None:
    """Send SIGTERM while streams run: they must end whole, and the server with status 0."""
    body = {"prompt": "one two", "max_tokens": 100, "stream": True, "ignore_eos": True}
    answers = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(8)]
    while await metric(client, "graphcore_requests_running") < 1:
        await asyncio.sleep(0.02)
    server.send_signal(signal.SIGTERM)
    for answer in await asyncio.gather(*answers, return_exceptions=True):
        if isinstance(answer, BaseException) or (answer.status_code == 200 and "[DONE]" not in answer.text):
            found.findings.append(f"an answer was cut by SIGTERM: {answer!r}")
    status = await asyncio.to_thread(server.wait, PATIENCE)
    if status:
        found.findings.append(f"the server ended with status {status}")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> int:
    """Start a server, run the clients, and print findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("settings", nargs="*", help="settings of the server")
    given = parser.parse_args()
    port = free_port()
    command = [sys.executable, "run.py", "task=serve", f"task.port={port}", "outputs=false", *given.settings]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            found = asyncio.run(soak(f"http://127.0.0.1:{port}", server, given.clients, given.seconds))
        finally:
            if server.poll() is None:
                server.kill()
    print(dict(found.outcomes), f"{len(found.findings)} findings", *found.findings[:20], sep="\n")
    return 1 if found.findings else 0


if __name__ == "__main__":
    sys.exit(main())
