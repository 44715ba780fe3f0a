"""Time graphcore and other engines (peers) in alternating runs; write JSON, a Markdown table and a bar chart."""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cases import CASES, prepare
from environments import interpreter_with
from instruction_sets import SETS, environment_of
from peer import Peer, find_peers
from reporting import draw_bars, installed, is_ours, spread

PHASES = ("prefill", "decode")
DEFAULT_ENGINES = ["graphcore", "graphcore-int8", "llama.cpp", "transformers", "transformers-compiled"]
Table = dict[str, dict[str, dict[str, float]]]


@dataclass
class Worker:
    """An engine in a process of its own; `weight_nbytes` are read by each decode step."""

    name: str
    process: subprocess.Popen[str]
    weight_nbytes: int = 0

    @classmethod
    def start(cls, name: str, source: str, threads: int, context: int, instruction_set: str = "native") -> "Worker":
        command = [
            interpreter_with(find_peers(Peer)[name].packages),
            str(Path(__file__).with_name("peer_process.py")),
            name,
            source,
            str(threads),
            str(context),
        ]
        quiet = {**environment_of(instruction_set), "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)
        worker = cls(name, process)
        ready = worker._answer()
        if not ready:
            raise SystemExit(f"{name} did not load; its message is above")
        worker.weight_nbytes = json.loads(ready)["weight_bytes"]
        return worker

    def run(self, prompt_tokens: int, new_tokens: int, depth: int = 0, sequences: int = 1) -> dict[str, float]:
        assert self.process.stdin is not None
        print(prompt_tokens, new_tokens, depth, sequences, file=self.process.stdin, flush=True)
        answer = self._answer()
        if not answer:
            raise SystemExit(f"{self.name} died; its message is above")
        times: dict[str, float] = json.loads(answer)
        return times

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> None:
    options = parse_options()
    overrides, path = prepare(options.model, options.num_layers)
    if options.sequences > 1:
        overrides.append(f"batch_size={options.sequences}")
    context = options.depth + options.prompt_tokens + options.new_tokens + 32
    names = [name for name in options.engines if is_ours(name) or path is not None]
    workers = [
        Worker.start(
            name,
            json.dumps(overrides) if is_ours(name) else str(path),
            options.threads,
            context,
            options.instruction_set,
        )
        for name in names
    ]
    for worker in workers:
        worker.run(options.prompt_tokens, 8, options.depth, options.sequences)  # warm-up, not counted
    runs: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
    for repeat in range(options.repeats):
        for worker in workers:
            sizes = (options.prompt_tokens, options.new_tokens, options.depth, options.sequences)
            runs[worker.name].append(worker.run(*sizes))
            print(
                f"repeat {repeat + 1}/{options.repeats} {worker.name}: {short(runs[worker.name][-1])}", file=sys.stderr
            )
    for worker in workers:
        worker.stop()
    write_report(options, runs, {worker.name: worker.weight_nbytes for worker in workers})


def read_bandwidth(threads: int) -> dict[str, float | None]:
    """Return the machine's read bandwidth in GB/s, by torch and by a C++ reader; shares refer to `best`."""
    import torch

    from graphcore.config.compose import compose_settings
    from graphcore.kernels.backend import find_backend
    from graphcore.kernels.bandwidth import READ_NBYTES, read_buffer

    torch.set_num_threads(threads)
    device = torch.device("cpu")
    backend, _ = find_backend(device, compose_settings([]).cache_folder)
    found = read_buffer(READ_NBYTES, backend, repeats=5)
    return {
        "best": found.best / 1e9,
        "torch": found.torch / 1e9,
        "native": None if found.native is None else found.native / 1e9,
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="smollm2", help=f"one of {', '.join(CASES)}; a model group of conf/model; a path"
    )
    parser.add_argument("--engines", nargs="+", default=DEFAULT_ENGINES, choices=list(find_peers(Peer)))
    parser.add_argument("--num-layers", type=int, help="layers of a random model, for a quick trial")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=0, help="tokens in the cache before each run, not timed")
    parser.add_argument("--sequences", type=int, default=1, help="sequences together; their tokens are added up")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--instruction-set",
        default="native",
        choices=SETS,
        help="what engines may use: avx2 and avx-vnni leave AVX-512 unused",
    )
    parser.add_argument("--baseline", default="llama.cpp", help="engine that ratios are relative to")
    parser.add_argument("--output", type=Path, default=Path("outputs/compare"))
    return parser.parse_args()


def short(run: dict[str, float]) -> str:
    return ", ".join(f"{phase} {run[phase]:.1f} tokens/s" for phase in PHASES)


def summary(runs: dict[str, list[dict[str, float]]], baseline: str) -> Table:
    """Return median, smallest and largest of each engine and phase, and the median of the ratios run by run."""
    table: Table = {}
    for name, own in runs.items():
        table[name] = {}
        for phase in PHASES:
            values = [run[phase] for run in own]
            row = spread(values)
            if baseline in runs:
                ratios = [mine[phase] / theirs[phase] for mine, theirs in zip(own, runs[baseline], strict=True)]
                row["ratio"] = statistics.median(ratios)
            table[name][phase] = row
    return table


def add_reading(table: Table, weight_nbytes: dict[str, int], sequences: int, gb_per_second: float) -> None:
    """Add to decode the weights that each engine reads: bytes per step, GB/s, and the share of the bandwidth."""
    for name, phases in table.items():
        rate = weight_nbytes[name] * phases["decode"]["median"] / sequences / 1e9
        phases["decode"] |= {"weight_bytes": weight_nbytes[name], "gb_per_second": rate, "share": rate / gb_per_second}


def write_report(
    options: argparse.Namespace, runs: dict[str, list[dict[str, float]]], weight_nbytes: dict[str, int]
) -> None:
    table, bandwidth = summary(runs, options.baseline), read_bandwidth(options.threads)
    add_reading(table, weight_nbytes, options.sequences, bandwidth["best"] or float("nan"))
    options.output.mkdir(parents=True, exist_ok=True)
    lengths = f"{options.prompt_tokens}-{options.new_tokens}" + (f"-at-{options.depth}" if options.depth else "")
    lengths += f"-{options.sequences}-together" if options.sequences > 1 else ""
    stem = options.output / f"{Path(options.model).stem}-{lengths}-{options.instruction_set}-{options.threads}"
    record = {
        "command": " ".join(sys.argv),
        "machine": machine_of(options),
        "versions": {name: installed(name) for name in ("graphcore", "torch", "transformers", "llama-cpp-python")},
        "read_gb_per_second": bandwidth,
        "summary": table,
        "runs": runs,
    }
    stem.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(options, table, bandwidth["best"]), encoding="utf-8")
    draw(options, table, stem.with_suffix(".png"))
    print(markdown(options, table, bandwidth["best"]))


def machine_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the machine, and what engines use of it."""
    from graphcore.device import cpu_name

    own = {"instruction_set": options.instruction_set, "threads": options.threads}
    return {"system": platform.platform(), "processor": cpu_name(), **own}


def markdown(options: argparse.Namespace, table: Table, gb_per_second: float | None) -> str:
    ratio = f"x {options.baseline}"
    lines = [
        f"{options.model}: {options.prompt_tokens} prompt tokens, {options.new_tokens} new tokens, "
        f"{f'{options.depth} tokens in the cache before, ' if options.depth else ''}"
        f"{f'{options.sequences} sequences together, ' if options.sequences > 1 else ''}"
        f"{options.threads} threads, instruction set {options.instruction_set}, {options.repeats} alternating repeats; "
        "tokens/s, median (min to max); GB/s of "
        f"weights that decode reads, and their share of the {gb_per_second:.1f} GB/s that memory gives",
        "",
        f"| engine | prefill | {ratio} | decode | {ratio} | GB/s | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, phases in table.items():
        cells = []
        for phase in PHASES:
            row = phases[phase]
            cells += [
                f"{row['median']:.1f} ({row['min']:.1f} to {row['max']:.1f})",
                f"{row.get('ratio', float('nan')):.2f}",
            ]
        cells += [f"{phases['decode']['gb_per_second']:.1f}", f"{phases['decode']['share']:.0%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(options: argparse.Namespace, table: Table, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PHASES), figsize=(10, 1.2 + 0.5 * len(table)), layout="constrained")
    for axis, phase in zip(axes, PHASES, strict=True):
        draw_bars(axis, {name: phases[phase] for name, phases in table.items()}, phase)
    axes[1].set_yticklabels([])
    figure.suptitle(
        f"{options.model}: {options.prompt_tokens} prompt, {options.new_tokens} new tokens, {options.threads} threads"
    )
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
