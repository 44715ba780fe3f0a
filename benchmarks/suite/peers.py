"""graphcore beside its peers: the same shape, prompt and number of tokens, in alternating runs on one card.

Each peer is a process of its own (peer_answers.py): transformers with a static cache, and gpt-fast's loop, which has no
package to install and is written anew in gpt_fast_peer.py. All compile at the same time, and then take turns.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.tasks.measuring.timed_runs import time_repeats
from suite.bench import Bench
from suite.log import Measurement
from suite.peer_answers import prompt_of

FOLDER = Path(__file__).parent
PACKED_BESIDE_DENSE = 1.4  # gpt-oss in bf16, and beside it with its experts in mxfp4
Answer = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """A peer that is on its way.

    Attributes:
        title: what it is called in the report.
        answer: waits for its next line; the first one says that it is ready.
        send: writes it a line.
    """

    title: str
    answer: Callable[[], Answer]
    send: Callable[[str], None]

    def run(self, prompt_tokens: int, new_tokens: int) -> float:
        """Return its decode tokens/s."""
        self.send(f"{prompt_tokens} {new_tokens}")
        rate: float = self.answer()["decode"]
        return rate


def llama(bench: Bench) -> None:
    compare(bench, "llama3_8b", "Llama-3.1-8B bf16", ["random:bf16", "random:q4_k"], ["transformers", "gpt_fast"], 3.0)


def gpt_oss(bench: Bench) -> None:
    compare(bench, "gpt_oss", "gpt-oss-20b", ["random:bf16"], ["transformers"], PACKED_BESIDE_DENSE)


def compare(
    bench: Bench, model: str, title: str, checkpoints: Sequence[str], names: Sequence[str], copies: float
) -> None:
    """Time every checkpoint of graphcore's against the peers in bf16, run by run.

    Args:
        copies: how often the weights are on the device at once, counted in bytes of bf16.
    """
    sizes = bench.sizes
    context = sizes.prompt + sizes.new + 8
    for checkpoint in ("random:", *checkpoints):
        bench.fit(model, checkpoint, ("off",), tokens=context, copies=copies, is_all_dense=True)
    with ExitStack() as stack:
        started = [stack.enter_context(process(bench, name, model, context)) for name in names]
        peers, ready, died = compiled(started)
        for peer in peers:
            peer.run(sizes.prompt, sizes.new)
        for checkpoint in checkpoints:
            name = f"{title} ({checkpoint.partition(':')[2]})"
            with bench.engine(model, checkpoint, f"context_length={context}") as loaded:
                ours, theirs = alternate(bench, loaded.engine, peers)
            rows = Measurement(f"{name}: graphcore decode beside them", "tokens/s", ours, settings=loaded.settings)
            bench.log.add(rows)
            for peer, said, rates in zip(peers, ready, theirs, strict=True):
                peer_rows(bench, name, peer.title, said, ours, rates)
    if died:
        raise RuntimeError("; ".join(died))


def compiled(started: Sequence[Process]) -> tuple[list[Process], list[Answer], list[str]]:
    """Wait until all peers have compiled; return those that did, what they said, and what is wrong with the others."""
    peers, ready, died = [], [], []
    for peer in started:
        try:
            ready.append(peer.answer())
        except RuntimeError as error:
            died.append(str(error))
        else:
            peers.append(peer)
    return peers, ready, died


def peer_rows(
    bench: Bench, name: str, title: str, said: Answer, ours: Sequence[float], theirs: Sequence[float]
) -> None:
    """Write down a peer's rate, and how many times it graphcore's is."""
    row = Measurement(f"{name}: {said['name']}, decode", "tokens/s", theirs)
    row.gb_per_second = said["weight_bytes"] * row.median / 1e9
    bench.log.add(row.of_ceiling("copy", bench.ceiling("copy"), row.gb_per_second))
    ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    over = Measurement(f"{name}: graphcore over {title}, decode", "x", [ratio])
    bench.log.add(over.aim("1.3 x", ratio >= 1.3) if title == "transformers" else over)


def alternate(bench: Bench, engine: Engine, peers: Sequence[Process]) -> tuple[list[float], list[list[float]]]:
    """Return graphcore's decode tokens/s and each peer's, run by run in turns."""
    sizes = bench.sizes
    prompt = prompt_of(sizes.prompt)

    def seconds(tokens: int) -> float:
        run = lambda: engine.generate([prompt], max_new_tokens=tokens, ignore_eos=True, temperature=0)  # noqa: E731
        return time_repeats(run, 1, bench.device)[0]

    seconds(sizes.new + 1)
    first = statistics.median(seconds(1) for _ in range(3))
    ours: list[float] = []
    theirs: list[list[float]] = [[] for _ in peers]
    for _ in range(sizes.repeats):
        ours.append(sizes.new / max(seconds(sizes.new + 1) - first, 1e-9))
        for peer, rates in zip(peers, theirs, strict=True):
            rates.append(peer.run(sizes.prompt, sizes.new))
    return ours, theirs


@contextmanager
def process(bench: Bench, name: str, model: str, context: int) -> Iterator[Process]:
    """Start a peer on the model's shape; its `answer` raises RuntimeError if it died, with a message in suite.log."""
    settings = compose_settings(bench.settings(model, "random:")).model
    config = {key: value for key, value in settings.random_config.items() if value is not None}
    if settings.num_hidden_layers is not None:
        config["num_hidden_layers"] = settings.num_hidden_layers
    command = [sys.executable, "-P", str(FOLDER / f"{name}_peer.py"), str(bench.device), str(context)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        lines, answers = started.stdin, started.stdout
        assert lines is not None, "it has a pipe"
        assert answers is not None, "it has a pipe"

        def answer() -> Answer:
            line = answers.readline()
            if not line:
                raise RuntimeError(f"{name} died; its message is in suite.log")
            found: Answer = json.loads(line)
            return found

        def send(line: str) -> None:
            print(line, file=lines, flush=True)

        try:
            send(json.dumps(config))
            yield Process(name.replace("_", "-"), answer, send)
        finally:
            lines.close()
