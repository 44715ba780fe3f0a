"""report.json and report.md from the lines of one run or of several; of two lines of one row the later counts."""

import json
from collections.abc import Sequence
from pathlib import Path

from suite.log import Line
from suite.machine import ram_in_words
from suite.registry import ALL

COLUMNS = ("measurement", "median", "min to max", "GB/s", "of ceiling", "target", "met", "what takes the time")
LAUNCH_COLUMNS = ("kernel", "grid", "a step", "us each", "bytes of weights", "GB/s", "share of the time")
MOST_LAUNCHES = 12
DRY = "**Dry run: tiny shapes on the CPU. These numbers mean nothing; only that the code runs.**"


def summarise(lines: Sequence[Line]) -> Line:
    """Return the report as one object."""
    rows: dict[tuple[str, str], Line] = {}
    outcomes: dict[str, Line] = {}
    for line in lines:
        if "measurement" in line:
            rows[line["part"], line["measurement"]["name"]] = line
        if "outcome" in line:
            outcomes[line["part"]] = line
    return {
        "dry": any(line["dry"] for line in lines),
        "runs": [line for line in lines if "command" in line],
        "machines": distinct([line["machine"] for line in lines if "machine" in line]),
        "smaller": [line for line in lines if "smaller" in line],
        "measurements": list(rows.values()),
        "outcomes": list(outcomes.values()),
        "not_run": [part.name for part in ALL if part.name not in outcomes],
    }


def distinct(machines: Sequence[Line]) -> list[Line]:
    """Return machines that differ in more than in how much RAM was free."""
    known: dict[str, Line] = {}
    for machine in machines:
        lasting = {**machine, "ram": {**machine["ram"], "free": None}}
        known.setdefault(json.dumps(lasting, sort_keys=True), machine)
    return list(known.values())


def write_report(lines: Sequence[Line], folder: Path) -> Line:
    """Write both files into the folder; return the report."""
    report = summarise(lines)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    return report


def markdown(report: Line) -> str:
    """Return the report for people."""
    text = ["# GPU suite", "", *([DRY, ""] if report["dry"] else []), *machine_lines(report), ""]
    for part in ALL:
        rows = [line["measurement"] for line in report["measurements"] if line["part"] == part.name]
        ended = [line for line in report["outcomes"] if line["part"] == part.name]
        if not rows and not ended:
            continue
        text += [f"## {part.name}: {part.title}", ""]
        text += [f"{line['outcome']}, {line.get('seconds', 0):.0f} s (estimated {part.seconds})" for line in ended]
        smaller = [line["smaller"] for line in report["smaller"] if line["part"] == part.name]
        text += [f"Smaller than the true shape: {words}." for words in dict.fromkeys(smaller)]
        text += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)] if rows else []
        text += ["| " + " | ".join(cells(row)) + " |" for row in rows]
        for row in rows:
            text += launch_lines(row)
        text.append("")
    if report["not_run"]:
        text += [f"Not run: {', '.join(report['not_run'])}.", ""]
    return "\n".join(text)


def launch_lines(row: Line) -> list[str]:
    """Return a table of the launches of a row's profile, those that take most first."""
    profile = row["details"].get("profile")
    if not profile or not profile["launches"]:
        return []
    lines = ["", f"Launches of {row['name'].replace('|', '/')}:", "", "| " + " | ".join(LAUNCH_COLUMNS) + " |"]
    lines.append("|" + "---|" * len(LAUNCH_COLUMNS))
    for launch in profile["launches"][:MOST_LAUNCHES]:
        nbytes = "" if launch["bytes"] is None else f"{launch['bytes']:,}"
        rate = "" if launch["gb_per_second"] is None else f"{launch['gb_per_second']:,.0f}"
        each = launch["microseconds"] / launch["count"]
        runs = f"{launch['count'] / profile['steps']:.3g}"
        found = [launch["name"], launch["grid"], runs, f"{each:.2f}", nbytes, rate, f"{launch['share']:.1%}"]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in found) + " |")
    return lines


def machine_lines(report: Line) -> list[str]:
    """Return device, versions, commands, commits and dates."""
    lines = []
    for machine in report["machines"]:
        versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
        lines.append(
            f"- {machine['device']}, driver {machine['driver'] or 'none'}, CUDA {machine['cuda']}, "
            f"Python {machine['python']}, {versions}; {machine['cpu']}, {machine['system']}"
        )
    lines += [f"- {words}" for words in dict.fromkeys(ram_in_words(one["ram"]) for one in report["machines"])]
    return lines + [f"- {run['at']}, commit {run['commit']}: `{run['command']}`" for run in report["runs"]]


def cells(row: Line) -> list[str]:
    spread = row["spread"]
    share = "" if row["share"] is None else f"{row['share']:.0%} of {row['ceiling']} ({row['ceiling_value']:,.4g})"
    met = {True: "yes", False: "no", None: ""}[row["met"]]
    rate = "" if row["gb_per_second"] is None else f"{row['gb_per_second']:,.1f}"
    rest = "; ".join(part for part in (row["note"], row["profile"]) if part)
    values = f"{spread['min']:,.4g} to {spread['max']:,.4g} (n={spread['repeats']})" if spread["repeats"] > 1 else ""
    found = [row["name"], f"{spread['median']:,.4g} {row['unit']}", values, rate, share, row["target"], met, rest]
    return [cell.replace("|", "/") for cell in found]
