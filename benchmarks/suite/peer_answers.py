"""How a peer in a process of its own talks with the suite.

    first line in     the model's config.json
    first line out    that it is ready, its weights' bytes, what it is
    each line in      "prompt_tokens new_tokens"
    each line out     tokens/s of a prefill and of a decode after it, and the first tokens

Legend: T tokens.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Peer(Protocol):
    """A model that runs one sequence, and leaves its tokens on the device until the end."""

    def prefill(self, prompt: list[int]) -> Tensor:
        """Run a prompt from an empty cache; return the next token, [1, 1] on the device."""

    def decode(self, token: Tensor, start: int, new_tokens: int) -> list[int]:
        """Return that many greedy tokens, the first of them chosen after `token` at position `start`."""

    def weight_nbytes(self) -> int:
        """Return the bytes of weights that a step reads."""

    def name(self) -> str:
        """Return what it is, with its version."""


def run(peer: Peer, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Return tokens/s of a prefill and of a decode after it."""
    prompt = prompt_of(prompt_tokens)
    began = time.perf_counter()
    token = peer.prefill(prompt)
    token.item()
    middle = time.perf_counter()
    chosen = peer.decode(token, prompt_tokens, new_tokens)
    ended = time.perf_counter()
    rates = {"prefill": prompt_tokens / (middle - began), "decode": new_tokens / (ended - middle)}
    return {**rates, "tokens": chosen[:8]}


def prompt_of(tokens: int) -> list[int]:
    """Return the prompt that all engines run."""
    return [(7 * index) % 400 + 100 for index in range(tokens)]


def answer(make: Callable[[dict[str, Any], torch.device, int], Peer]) -> None:
    """Make a peer of the config that comes first, and answer each line until there is none.

    Args:
        make: takes config, device and context; what it returns has compiled all that it will run.
    """
    device, context = torch.device(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    peer = make(json.loads(sys.stdin.readline()), device, context)
    ready = {"weight_bytes": peer.weight_nbytes(), "name": peer.name()}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        prompt_tokens, new_tokens = map(int, line.split())
        print(json.dumps(run(peer, prompt_tokens, new_tokens)), file=answers, flush=True)
