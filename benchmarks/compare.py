"""Time graphcore beside its peers in alternating runs; write JSON, a Markdown table and a bar chart."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engines import ENGINES

PHASES = ("prefill", "decode")


@dataclass
class Worker:
    """An engine in a process of its own."""

    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, name: str, path: Path, threads: int, context: int) -> "Worker":
        command = [
            sys.executable,
            str(Path(__file__).with_name("engines.py")),
            name,
            str(path),
            str(threads),
            str(context),
        ]
        quiet = {**os.environ, "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)
        worker = cls(name, process)
        if worker._answer() != "ready\n":
            raise SystemExit(f"{name} did not load; its message is above")
        return worker

    def run(self, prompt_tokens: int, new_tokens: int) -> dict[str, float]:
        assert self.process.stdin is not None
        print(prompt_tokens, new_tokens, file=self.process.stdin, flush=True)
        answer = self._answer()
        if not answer:
            raise SystemExit(f"{self.name} died; its message is above")
        return json.loads(answer)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> None:
    options = parse_options()
    path = checkpoint_path(options.model)
    context = options.prompt_tokens + options.new_tokens + 32
    workers = [Worker.start(name, path, options.threads, context) for name in options.engines]
    for worker in workers:
        worker.run(options.prompt_tokens, 8)  # not counted
    runs: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
    for repeat in range(options.repeats):
        for worker in workers:
            runs[worker.name].append(worker.run(options.prompt_tokens, options.new_tokens))
            print(
                f"repeat {repeat + 1}/{options.repeats} {worker.name}: {short(runs[worker.name][-1])}", file=sys.stderr
            )
    for worker in workers:
        worker.stop()
    write_report(options, runs)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a model group of conf/model, or a path")
    parser.add_argument(
        "--engines", nargs="+", default=["graphcore", "llama.cpp", "transformers"], choices=list(ENGINES)
    )
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--baseline", default="llama.cpp", help="engine that ratios are to")
    parser.add_argument("--output", type=Path, default=Path("outputs/compare"))
    return parser.parse_args()


def checkpoint_path(model: str) -> Path:
    """Return the local file of a model group, fetched if need be, or the path that was given."""
    if Path(model).exists():
        return Path(model)
    from graphcore.checkpoint.sources.fetch import resolve_source
    from graphcore.config.compose import compose_settings

    settings = compose_settings([f"model={model}"])
    cache_dir = Path(settings.cache_dir).expanduser()
    return resolve_source(settings.model.checkpoint, cache_dir, settings.model.expected_sha256)


def short(run: dict[str, float]) -> str:
    return ", ".join(f"{phase} {run[phase]:.1f} tokens/s" for phase in PHASES)


def summary(runs: dict[str, list[dict[str, float]]], baseline: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return median, smallest and largest of each engine and phase, and the median of the ratios run by run."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, own in runs.items():
        table[name] = {}
        for phase in PHASES:
            values = [run[phase] for run in own]
            row = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            if baseline in runs:
                ratios = [mine[phase] / theirs[phase] for mine, theirs in zip(own, runs[baseline], strict=True)]
                row["ratio"] = statistics.median(ratios)
            table[name][phase] = row
    return table


def write_report(options: argparse.Namespace, runs: dict[str, list[dict[str, float]]]) -> None:
    table = summary(runs, options.baseline)
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / f"{Path(options.model).stem}-{options.prompt_tokens}-{options.new_tokens}"
    record = {
        "command": " ".join(sys.argv),
        "machine": {"system": platform.platform(), "threads": options.threads},
        "versions": {name: installed(name) for name in ("graphcore", "torch", "transformers", "llama-cpp-python")},
        "summary": table,
        "runs": runs,
    }
    stem.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(options, table), encoding="utf-8")
    draw(options, table, stem.with_suffix(".png"))
    print(markdown(options, table))


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def markdown(options: argparse.Namespace, table: dict[str, dict[str, dict[str, float]]]) -> str:
    ratio = f"x {options.baseline}"
    lines = [
        f"{options.model}: {options.prompt_tokens} prompt tokens, {options.new_tokens} new tokens, "
        f"{options.threads} threads, {options.repeats} alternating repeats; tokens/s, median (min to max)",
        "",
        f"| engine | prefill | {ratio} | decode | {ratio} |",
        "|---|---|---|---|---|",
    ]
    for name, phases in table.items():
        cells = []
        for phase in PHASES:
            row = phases[phase]
            cells += [
                f"{row['median']:.1f} ({row['min']:.1f} to {row['max']:.1f})",
                f"{row.get('ratio', float('nan')):.2f}",
            ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(options: argparse.Namespace, table: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PHASES), figsize=(10, 1.2 + 0.5 * len(table)), layout="constrained")
    names = list(table)
    for axis, phase in zip(axes, PHASES, strict=True):
        rows = [table[name][phase] for name in names]
        medians = [row["median"] for row in rows]
        spread = [[row["median"] - row["min"] for row in rows], [row["max"] - row["median"] for row in rows]]
        colours = ["#1f6f8b" if name.startswith("graphcore") else "#b8b8b8" for name in names]
        bars = axis.barh(names, medians, xerr=spread, color=colours, capsize=3)
        axis.bar_label(bars, [f"{value:.0f}" for value in medians], padding=6)
        axis.set(title=phase, xlabel="tokens/s")
        axis.margins(x=0.18)
        axis.invert_yaxis()
    axes[1].set_yticklabels([])
    figure.suptitle(
        f"{options.model}: {options.prompt_tokens} prompt, {options.new_tokens} new tokens, {options.threads} threads"
    )
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
