"""Routing by shared beginnings, with and without: chats of ten turns on four simulated replicas, and on real ones.

    python benchmarks/replica_routing.py                                     # simulated
    graphcore serve task.replicas=2 & python benchmarks/replica_routing.py --url http://127.0.0.1:8000/v1

Without it, a request goes to the replica with the fewest requests. On a server that is asked for by giving each
request an `instructions` field of its own: /v1/chat/completions ignores that, and the router takes it for the beginning
of the prompt.
"""

import argparse
import json
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

import httpx

from graphcore.serving.replicas.prefix_keys import prefix_keys
from graphcore.serving.replicas.prefix_table import PrefixTable, RoutingHint

TURNS = 10
CACHE_TOKENS = 32_000  # of a simulated replica's prefix cache
TOKEN_CHARS = 4
SYSTEM = "You are a helpful assistant. Answer in short sentences, and say so when you do not know. " * 4


@dataclass
class SimulatedReplica:
    """A replica that computes 500 prompt tokens and 50 new tokens a second, one request after another.

    Attributes:
        held: chats in its prefix cache, with their tokens, the oldest first.
        free_at: seconds at which it has nothing more to do.
    """

    held: OrderedDict[int, int] = field(default_factory=OrderedDict)
    free_at: float = 0.0

    def run(self, chat: int, prompt: int, new: int, begins: float) -> tuple[float, int]:
        """Return when an answer has ended, and how many tokens of its prompt were computed."""
        computed = prompt - min(self.held.pop(chat, 0), prompt)
        self.held[chat] = prompt + new
        while sum(self.held.values()) > CACHE_TOKENS:
            self.held.popitem(last=False)
        self.free_at = max(self.free_at, begins) + computed / 500 + new / 50
        return self.free_at, computed


@dataclass
class Result:
    """What a run of chats took.

    Attributes:
        seconds: from the first request to the last answer.
        computed: share of the prompts' tokens that was computed, not found in a cache.
        answers: seconds of each answer.
    """

    seconds: float
    computed: float
    answers: Sequence[float]

    def __str__(self) -> str:
        """Return the result in words."""
        quarter = statistics.quantiles(self.answers, n=20)[-1]
        return (
            f"{self.computed:.0%} of the prompts' tokens computed, {self.seconds:.1f} s in all, an answer "
            f"{statistics.median(self.answers):.2f} s (median), {quarter:.2f} s (95 %)"
        )


def simulated(num_chats: int, by_prefix: bool, seed: int) -> Result:
    """Run chats that begin at random times on four replicas; each turn follows its last answer after a pause."""
    draw, table, replicas = random.Random(seed), PrefixTable(4), [SimulatedReplica() for _ in range(4)]
    due = sorted((draw.uniform(0, 60), chat, 0) for chat in range(num_chats))
    ends: list[tuple[float, str]] = []
    total = computed = 0
    answers = []
    while due:
        now, chat, turn = due.pop(0)
        for ended, replica in [one for one in ends if one[0] <= now]:
            table.note_end(replica)
            ends.remove((ended, replica))
        prompt = len(SYSTEM) // TOKEN_CHARS + (turn + 1) * 60 + turn * 80
        keys = [f"{chat} {done}".encode() for done in range(turn + 1)] if by_prefix else []
        hint = RoutingHint(keys)
        name = table.order(hint, [str(one) for one in range(4)])[0]
        table.note_sent(name)
        table.note_taken(hint, name)
        end, new = replicas[int(name)].run(chat, prompt, 80, now)
        ends.append((end, name))
        answers.append(end - now)
        total, computed = total + prompt, computed + new
        if turn + 1 < TURNS:
            due.append((end + draw.uniform(1, 10), chat, turn + 1))
            due.sort()
    return Result(max(one.free_at for one in replicas), computed / total, answers)


def real(url: str, num_chats: int, num_clients: int, pause: float, by_prefix: bool) -> Result:
    """Run chats on a server, some at a time, with random pauses before their turns, of `pause` seconds at most."""
    total, cached, answers, unique = 0, 0, list[float](), count(time.time_ns())

    def chat(number: int) -> tuple[int, int]:
        messages = [{"role": "system", "content": f"{SYSTEM}{time.time_ns()}"}]
        prompts, found, draw = 0, 0, random.Random(number)
        with httpx.Client(timeout=600) as client:
            for turn in range(TURNS):
                time.sleep(draw.uniform(0, pause))
                messages.append({"role": "user", "content": f"{number}, {turn}: tell me about the number {turn}."})
                body = {"messages": messages, "max_tokens": 40, "temperature": 0}
                began = time.perf_counter()
                noise = {} if by_prefix else {"instructions": str(next(unique))}
                answer = client.post(f"{url}/chat/completions", json={**body, **noise}).raise_for_status().json()
                answers.append(time.perf_counter() - began)
                usage = answer["usage"]
                prompts += usage["prompt_tokens"]
                found += usage["prompt_tokens_details"]["cached_tokens"]
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        return prompts, found

    began = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        for prompts, found in pool.map(chat, range(num_chats)):
            total, cached = total + prompts, cached + found
    return Result(time.perf_counter() - began, 1 - cached / total, answers)


def hint_seconds() -> float:
    """Return the seconds that the keys of a chat of 40,000 characters take."""
    messages = [{"role": "user", "content": "x" * 1000} for _ in range(40)]
    body = json.dumps({"messages": messages}).encode()
    began = time.perf_counter()
    for _ in range(100):
        prefix_keys(body)
    return (time.perf_counter() - began) / 100


def main() -> None:
    """Print a line for each run, with and without in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="server to ask; without one, replicas are simulated")
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--clients", type=int, default=4, help="chats at a time, on a server")
    parser.add_argument("--pause", type=float, default=1.0, help="longest pause before a turn in seconds, on a server")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(f"keys of 40,000 characters: {hint_seconds() * 1e3:.2f} ms")
    for repeat in range(given.repeats):
        for by_prefix in (False, True):
            way = "by beginning" if by_prefix else "by load     "
            if given.url:
                print(f"{way}  {real(given.url, given.chats, given.clients, given.pause, by_prefix)}", flush=True)
            else:
                print(f"{way}  {simulated(given.chats, by_prefix, repeat)}")


if __name__ == "__main__":
    main()
