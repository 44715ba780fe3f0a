"""Decode speed beside other busy processes, as a share of each engine's speed on the idle machine.

Runs alternate between the engines, each in a process that stays loaded; llama-bench programs (llama.cpp's,
ik_llama.cpp's) are started for each run. Neighbours are processes that only count in a loop. The runs on the idle
machine come first; shares are relative to them.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cases import prepare
from compare import Worker
from peer import Peer, find_peers
from reporting import is_ours, spread

COUNT = "n = 0\nwhile True: n += 1"
PROMPT_TOKENS = 16
Turn = Callable[[int], float]


def main() -> None:
    options = parse_options()
    overrides, path = prepare(options.model, None)
    workers = {
        name: Worker.start(name, json.dumps(overrides) if is_ours(name) else str(path), options.threads, 1024)
        for name in options.engines
    }
    turns: dict[str, Turn] = {name: decode_turn(worker) for name, worker in workers.items()}
    for named in options.llama_bench:
        name, _, command = named.partition("=")
        turns[name] = bench_turn(command.split(), str(path), options.threads)
    for turn in turns.values():
        turn(4)  # warm-up, not counted
    table: dict[str, dict[int, dict[str, float]]] = {name: {} for name in turns}
    for count in (0, *options.neighbours):
        speeds: dict[str, list[float]] = {name: [] for name in turns}
        with busy(count):
            for _ in range(options.repeats):
                for name, turn in turns.items():
                    speeds[name].append(turn(options.new_tokens))
        for name, values in speeds.items():
            row = spread(values)
            table[name][count] = {**row, "share": row["median"] / (table[name].get(0) or row)["median"]}
        print(f"{count} neighbours: done", file=sys.stderr)
    for worker in workers.values():
        worker.stop()
    report(options, table)


def decode_turn(worker: Worker) -> Turn:
    """Return a function that decodes a number of tokens and returns the tokens per second."""
    return lambda new_tokens: worker.run(PROMPT_TOKENS, new_tokens)["decode"]


def bench_turn(command: Sequence[str], model: str, threads: int) -> Turn:
    """Return a function that decodes a number of tokens in a llama-bench and returns the tokens per second."""
    fixed = [*command, "-m", model, "-t", str(threads), "-p", "0", "-r", "1", "-o", "json"]

    def turn(new_tokens: int) -> float:
        done = subprocess.run([*fixed, "-n", str(new_tokens)], capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout[done.stdout.index("[") :])[0]["avg_ts"])

    return turn


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` other processes busy inside the block."""
    processes = [subprocess.Popen([sys.executable, "-c", COUNT]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def report(options: argparse.Namespace, table: dict[str, dict[int, dict[str, float]]]) -> None:
    """Print a table and write the same as JSON."""
    counts = (0, *options.neighbours)
    print(f"| {options.model}, decode tokens/s | " + " | ".join(f"{count} neighbours" for count in counts) + " |")
    print("|---" * (len(counts) + 1) + "|")
    for name, rows in table.items():
        cells = [
            f"{row['median']:.1f} ({row['min']:.1f} to {row['max']:.1f}), {row['share']:.2f}" for row in rows.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    options.output.mkdir(parents=True, exist_ok=True)
    record = {"model": options.model, "threads": options.threads, "processors": os.cpu_count(), "table": table}
    (options.output / "neighbours.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as for compare.py")
    parser.add_argument("--engines", nargs="+", default=["graphcore"], choices=list(find_peers(Peer)))
    parser.add_argument(
        "--llama-bench",
        nargs="*",
        default=[],
        metavar="NAME=COMMAND",
        help='llama-bench programs to run beside them, with flags of their own: "ik=/path/to/llama-bench -rtr 1"',
    )
    parser.add_argument("--neighbours", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("outputs/neighbours"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
