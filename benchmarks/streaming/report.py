"""The report of the streaming comparison: JSON, a Markdown table, a bar chart."""

import argparse
import json
import platform
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from disk import RawRead
from reporting import draw_bars, is_ours, spread

from streaming.watched_process import Outcome

TARGETS = (  # ours, theirs, how many times its tokens/s
    ("graphcore-on", "airllm", 5.0),
    ("graphcore-auto", "accelerate-disk", 2.0),
    ("graphcore-auto", "accelerate-auto", 2.0),
    ("graphcore-on", "llama.cpp", 1.0),
    ("graphcore-auto", "llama.cpp", 1.0),
)


@dataclass
class Comparison:
    """Everything that was measured; `is_limited` where each process had a memory group of its own."""

    options: argparse.Namespace
    model_nbytes: int
    is_limited: bool
    runs: dict[str, list[Outcome]]
    raw_reads: list[RawRead] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        return [name for name in self.runs if not is_ours(name)]

    @property
    def raw_gb_per_second(self) -> float | None:
        return statistics.median([read.gb_per_second for read in self.raw_reads]) if self.raw_reads else None

    def speeds(self, name: str) -> dict[str, float] | None:
        """Return median, smallest and largest tokens/s; None where no run came to an end."""
        values = [run.tokens_per_second for run in self.runs[name] if run.error is None]
        return spread([value for value in values if value is not None]) if values else None

    def ratio(self, name: str, peer: str) -> float | None:
        """Return the median of the ratios of tokens/s round by round, of the rounds that both came through."""
        pairs = zip(self.runs.get(name, []), self.runs.get(peer, []), strict=False)
        ratios = [
            mine.tokens_per_second / theirs.tokens_per_second
            for mine, theirs in pairs
            if mine.error is None and theirs.error is None and mine.tokens_per_second and theirs.tokens_per_second
        ]
        return statistics.median(ratios) if ratios else None

    def targets(self) -> list[tuple[str, str, float, float | None]]:
        """Return the targets whose engines took part, each with the ratio that was found."""
        asked = [target for target in TARGETS if target[0] in self.runs and target[1] in self.runs]
        return [(ours, theirs, times, self.ratio(ours, theirs)) for ours, theirs, times in asked]


def write_report(comparison: Comparison) -> None:
    stem = comparison.options.output / "streaming"
    stem.with_suffix(".json").write_text(json.dumps(record(comparison), indent=2) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(comparison), encoding="utf-8")
    draw(comparison, stem.with_suffix(".png"))
    print(markdown(comparison))


def record(comparison: Comparison) -> dict[str, Any]:
    names = list(comparison.runs)
    return {
        "command": shlex.join(sys.argv),
        "options": {key: str(value) for key, value in vars(comparison.options).items()},
        "machine": {"system": platform.platform(), "threads": comparison.options.threads},
        "versions": {
            key: text for runs in comparison.runs.values() for run in runs for key, text in run.versions.items()
        },
        "model_bytes": comparison.model_nbytes,
        "notes": comparison.notes,
        "raw_reads": [asdict(read) for read in comparison.raw_reads],
        "summary": {
            name: {
                "tokens_per_second": comparison.speeds(name),
                "ratio_to": {peer: comparison.ratio(name, peer) for peer in comparison.peers},
            }
            for name in names
        },
        "targets": [
            {"engine": ours, "peer": theirs, "at_least": times, "ratio": found}
            for ours, theirs, times, found in comparison.targets()
        ],
        "runs": {name: [asdict(run) for run in runs] for name, runs in comparison.runs.items()},
    }


def title(comparison: Comparison) -> str:
    options = comparison.options
    model = "random bf16 llama of Llama 3.2 1B's shape" if options.model is None else options.model.name
    layers = f", {options.num_layers} layers" if options.model is None and options.num_layers != 16 else ""
    limit = f"in {options.limit / 1e9:.2f} GB of memory" if comparison.is_limited else "memory not limited"
    return (
        f"{model}{layers}, {comparison.model_nbytes / 1e9:.2f} GB, {limit}: "
        f"{options.prompt_tokens} prompt, {options.new_tokens} new tokens, {options.threads} threads"
    )


def markdown(comparison: Comparison) -> str:
    options, peers = comparison.options, comparison.peers
    lines = [
        f"{title(comparison)}, {options.repeats} alternating repeats; tokens/s after the first token, median (min "
        f"to max); seconds and peaks are medians; budgets: graphcore-on {options.budget_on / 1e6:.0f} MB, *-auto "
        f"{options.budget_auto / 1e6:.0f} MB",
        "",
        f"| engine | tokens/s | {''.join(f'x {peer} | ' for peer in peers)}first token, s | load, s | group peak, MB "
        "| resident peak, MB | of it not file pages, MB | runs that died |",
        "|---" * (8 + len(peers)) + "|",
        *(engine_row(comparison, name) for name in comparison.runs),
        "",
    ]
    if comparison.raw_gb_per_second is not None:
        raw, how = comparison.raw_gb_per_second, comparison.raw_reads[0].how
        rates = [f"{read.gb_per_second:.2f}" for read in comparison.raw_reads]
        whole = raw * 1e9 / comparison.model_nbytes
        lines.append(f"* raw read of the same file in the same session ({how}): {', '.join(rates)} GB/s by round; at")
        lines[-1] += f" the median, reading the whole file for each token gives {whole:.2f} tokens/s"
    for ours, theirs, times, found in comparison.targets():
        verdict = "not measured" if found is None else f"{found:.2f} x, {'met' if found >= times else 'missed'}"
        lines.append(f"* target: {ours} at least {times:g} x {theirs}: {verdict}")
    lines.append(f"* {agreement(comparison.runs)}")
    loads = [run.load_average_before for runs in comparison.runs.values() for run in runs if run.load_average_before]
    if loads:
        lines.append(f"* load average of the machine before a run: {min(loads):.1f} to {max(loads):.1f}")
    lines += [f"* {text}" for text in comparison.notes]
    lines += [f"* {name}: {error}" for name, runs in comparison.runs.items() for error in errors_of(runs)]
    return "\n".join(lines) + "\n"


def agreement(runs: dict[str, list[Outcome]]) -> str:
    """Return in one line which engines made the same tokens."""
    makers: dict[tuple[int, ...], list[str]] = {}
    for name, own in runs.items():
        for tokens in sorted({tuple(run.tokens) for run in own if run.error is None}):
            makers.setdefault(tokens, []).append(name)
    if len(makers) == 1:
        return "all engines made the same tokens"
    return "engines that made the same tokens: " + "; ".join(", ".join(names) for names in makers.values())


def errors_of(runs: list[Outcome]) -> list[str]:
    return sorted({run.error for run in runs if run.error is not None})


def engine_row(comparison: Comparison, name: str) -> str:
    runs, speeds = comparison.runs[name], comparison.speeds(name)
    speed = "-" if speeds is None else f"{speeds['median']:.3f} ({speeds['min']:.3f} to {speeds['max']:.3f})"
    ratios = [number(comparison.ratio(name, peer), 2) for peer in comparison.peers]
    seconds = [number(median_of(runs, key), 2) for key in ("first_token_seconds", "load_seconds")]
    peaks = [number(median_of(runs, f"peak_{kind}_bytes"), 0, 1e6) for kind in ("group", "resident", "anonymous")]
    died = str(sum(run.error is not None for run in runs))
    return f"| {' | '.join([name, speed, *ratios, *seconds, *peaks, died])} |"


def median_of(runs: list[Outcome], key: str) -> float | None:
    values = [asdict(run)[key] for run in runs if asdict(run)[key] is not None]
    return statistics.median(values) if values else None


def number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def draw(comparison: Comparison, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = {name: comparison.speeds(name) for name in comparison.runs}
    bars = {name: found for name, found in speeds.items() if found is not None}
    died = ", ".join(name for name, found in speeds.items() if found is None)
    figure, axis = pyplot.subplots(figsize=(10, 1.6 + 0.5 * len(bars)), layout="constrained")
    draw_bars(axis, bars, f"decode; died: {died}" if died else "decode", digits=2)
    if comparison.raw_gb_per_second is not None:
        whole = comparison.raw_gb_per_second * 1e9 / comparison.model_nbytes
        label = f"the whole file for each token, at the raw {comparison.raw_gb_per_second:.2f} GB/s"
        axis.axvline(whole, color="#c05020", linestyle="--", linewidth=1, label=label)
        figure.legend(loc="outside lower right", fontsize=8, frameon=False)
    figure.suptitle(title(comparison), fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
