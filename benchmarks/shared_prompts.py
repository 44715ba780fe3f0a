"""Measures requests with a common prefix, and requests in a KV cache that is too small for all of them, on the CPU.

`python -m benchmarks.shared_prompts MODEL [key=value ...]` prints

* seconds to the first token of a prompt of 1,020 tokens, and of another one that shares 1,000 of them;
* seconds of 64 requests of 1,000 + 8 tokens that share 900, and of 64 that share none, and the pages that each held;
* 32 requests of 128 + 128 tokens in a cache for a quarter of that: whether their outputs are equal to those in a cache
  for all, and the seconds of both.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import GraphcoreError

Prompts = Sequence[Sequence[int]]


class Words:
    """Random tokens."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._random, self._vocab = random.Random(seed), vocab

    def __call__(self, count: int) -> list[int]:
        """Return `count` random tokens."""
        return [self._random.randrange(self._vocab) for _ in range(count)]


def first_token(model: str, overrides: Sequence[str], rounds: int) -> None:
    """Print the time to the first token with and without a shared prefix."""
    found = []
    with load(model, "batching.max_sequences=1", "context_length=2048", *overrides) as engine:
        engine.generate([[1] * 40], 2)  # builds the programs
        for seed in range(rounds):
            words = Words(engine.config.vocab_size, seed)
            shared = words(1000)
            seconds = [timed(engine, [[*shared, *words(20)]], 1) for _ in range(2)]
            found.append(seconds)
    alone, again = (statistics.median(each) for each in zip(*found, strict=True))
    print(f"first token of 1,020: {alone:.3f} s; with 1,000 cached: {again:.3f} s, {again / alone:.3f} of it")


def many(model: str, overrides: Sequence[str]) -> None:
    """Print the time of 64 requests that share most of their prompts, and of 64 that share nothing."""
    with load(model, "batching.max_sequences=64", "context_length=1024", *overrides) as engine:
        words, pages = Words(engine.config.vocab_size, 0), most_pages(engine)
        engine.generate([[1] * 40], 2)
        beginning = words(900)
        for name, prompts in (
            ("share 900 of 1,000", [[*beginning, *words(100)] for _ in range(64)]),
            ("share nothing", [words(1000) for _ in range(64)]),
        ):
            pages.clear()
            print(f"64 requests {name}: {timed(engine, prompts, 8):.2f} s, {max(pages)} pages of rows", flush=True)


def most_pages(engine: Engine) -> list[int]:
    """Return a list that grows with each pass by the number of different pages that rows have in the largest table."""
    assert isinstance(engine.runner, ProgramRunner)
    table, counts = max(engine.runner.pages.tables, key=lambda table: table.num_pages), list[int]()
    engine._on_progress = lambda *_: counts.append(len({page for row in table.rows for page in row.values()}))
    return counts


def crowd(model: str, overrides: Sequence[str]) -> None:
    """Print whether 32 requests in a cache for 8 of them have the same outputs as in a cache for all."""
    answers, seconds = [], []
    for tokens in (32 * 256, 8 * 256):
        sizes = ("batching.max_sequences=32", "context_length=256", f"batching.cache_tokens={tokens}")
        with load(model, *sizes, *overrides) as engine:
            words = Words(engine.config.vocab_size, 0)
            engine.generate([[1] * 40], 2)
            began = time.perf_counter()
            handles = [engine.submit(words(128), 128, ignore_eos=True, temperature=0) for _ in range(32)]
            answers.append([handle.result().token_ids for handle in handles])
            seconds.append(time.perf_counter() - began)
    same = sum(one == other for one, other in zip(*answers, strict=True))
    print(f"32 requests: {seconds[0]:.1f} s, in a quarter of the cache {seconds[1]:.1f} s, {same} answers the same")


def timed(engine: Engine, prompts: Prompts, new: int) -> float:
    """Return the seconds until all prompts are answered."""
    began = time.perf_counter()
    for handle in [engine.submit(prompt, new, ignore_eos=True, temperature=0) for prompt in prompts]:
        handle.result()
    return time.perf_counter() - began


def load(model: str, *overrides: str) -> Engine:
    """Return an engine on the CPU."""
    return Engine.load(model, dtype="bf16", device="cpu", overrides=overrides)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    try:
        first_token(given.model, given.overrides, given.rounds)
        many(given.model, given.overrides)
        crowd(given.model, given.overrides)
    except GraphcoreError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
