"""Time graphcore's streaming beside AirLLM, accelerate's disk offload and llama.cpp's mmap, with too little memory.

The model is a bf16 llama of 1.2B random weights (2.4 GB; made once, in benchmarks/ of graphcore's cache folder) or any
Hugging Face folder (--model). Every run is a process of its own in a fresh memory cgroup (--limit, file pages count),
joined before anything is imported; before it the page cache is emptied. Runs alternate between the engines. AirLLM
writes a second copy of the model and graphcore its compile cache before anything is timed, outside the cgroup.
Root is needed for the cgroup and for emptying the cache; without it the report says what was not done.

    pip install -e '.[peers]'
    python benchmarks/streaming_compare.py --repeats 3

For an engine in another environment: --python-for airllm=/opt/air/bin/python --python-for accelerate=...
(a name stands for all engines that begin with it). JSON, a Markdown table and a chart are written to --output, with a
log for each process. --num-layers 2 is for a quick trial. The cache folder needs 10 GB of disk: model, GGUF, AirLLM's
copy.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from disk import RawRead, cached_share, drop_caches, raw_read
from memory_group import Controller, MemoryGroup, memory_controller
from peer import StreamedRun, StreamingPeer, find_peers
from reporting import is_ours
from streaming.model import StreamedModel, random_model
from streaming.report import Comparison, write_report
from streaming.watched_process import Outcome, run_process

DEFAULT_ENGINES = ["graphcore-on", "graphcore-auto", "airllm", "accelerate-disk", "accelerate-auto", "llama.cpp"]
UNITS = {"": 1, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}


def main() -> None:
    options = parse_options()
    cache = options.cache or default_cache()
    model = StreamedModel.of(options.model or random_model(cache, options.num_layers), cache)
    model.scratch.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    runs = {name: run_of(name, options, model) for name in options.engines}
    with memory_controller() as controller:
        is_limited = isinstance(controller, Controller)
        comparison = Comparison(options, model.nbytes, is_limited, {name: [] for name in runs})
        if isinstance(controller, str):
            comparison.notes.append(controller)
        failed = prepare(options, runs)
        for name, outcome in failed.items():
            comparison.runs[name].append(outcome)
        for repeat in range(options.repeats):
            comparison.raw_reads += measured_raw_read(model.largest_file, comparison.notes)
            for name in [name for name in runs if name not in failed]:
                outcome = one_run(name, repeat, runs[name], options, controller, model, comparison.notes)
                comparison.runs[name].append(outcome)
                print(f"repeat {repeat + 1}/{options.repeats} {name}: {outcome.line()}", file=sys.stderr)
    write_report(comparison)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with safetensors; random weights if left out")
    parser.add_argument("--num-layers", type=int, default=16, help="layers of the random model")
    parser.add_argument("--engines", nargs="+", default=DEFAULT_ENGINES, choices=list(find_peers(StreamingPeer)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=9, help="new tokens; the first is timed separately")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=size, default=size("1.5GB"), help="limit of each process's memory cgroup")
    parser.add_argument("--budget-on", type=size, default=size("300MB"), help="memory budget of graphcore-on")
    parser.add_argument(
        "--budget-auto", type=size, default=size("900MB"), help="memory budget of graphcore-auto and accelerate-auto"
    )
    parser.add_argument("--set", action="append", default=[], help="a setting of graphcore, key=value; may be repeated")
    parser.add_argument("--python-for", action="append", default=[], metavar="ENGINE=PYTHON", type=interpreter)
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one process may take")
    parser.add_argument("--cache", type=Path, help="folder for models and second copies")
    parser.add_argument("--output", type=Path, default=Path("outputs/streaming_compare"))
    options = parser.parse_args()
    if options.new_tokens < 2 or options.repeats < 1:
        parser.error("--new-tokens is at least 2 (the first is timed apart), --repeats at least 1")
    return options


def size(text: str) -> int:
    """Return bytes from "300MB", "1.5GiB" or a plain number."""
    number = text.rstrip("MGiB")
    try:
        return int(float(number) * UNITS[text[len(number) :]])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text} is no size; write it as 300MB or 1.5GiB") from None


def interpreter(text: str) -> tuple[str, str]:
    name, equals, python = text.partition("=")
    if not equals or not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"{text}: write it as airllm=/path/to/python, of a file that is there")
    return name, python


def default_cache() -> Path:
    from graphcore.config.compose import compose_settings

    return compose_settings([]).cache_folder / "benchmarks"


def run_of(name: str, options: argparse.Namespace, model: StreamedModel) -> StreamedRun:
    budgets = {
        "graphcore-on": options.budget_on,
        "graphcore-auto": options.budget_auto,
        "accelerate-auto": options.budget_auto,
    }
    scratch = model.scratch / name
    scratch.mkdir(exist_ok=True)
    return StreamedRun(
        source=str(model.gguf() if name == "llama.cpp" else model.folder),
        threads=options.threads,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        budget=budgets.get(name),
        scratch=str(scratch),
        overrides=tuple(options.set) if is_ours(name) else (),
    )


def command_of(name: str, asked: StreamedRun, options: argparse.Namespace) -> list[str]:
    python = next((path for prefix, path in options.python_for if name.startswith(prefix)), sys.executable)
    return [python, str(Path(__file__).parent / "streaming" / "peer_process.py"), name, json.dumps(asdict(asked))]


def prepare(options: argparse.Namespace, runs: dict[str, StreamedRun]) -> dict[str, Outcome]:
    """Load the engines that write files at their first load, without a memory limit; return the failed outcomes."""
    peers, failed = find_peers(StreamingPeer), {}
    for name, asked in runs.items():
        if peers[name].engine.prepares:
            print(f"preparing {name}", file=sys.stderr)
            command = command_of(name, StreamedRun(**{**asdict(asked), "new_tokens": 0}), options)
            outcome = run_process(command, None, options.output / f"{name}-prepare.log", options.timeout)
            if outcome.error is not None:
                print(f"{name}: {outcome.line()}", file=sys.stderr)
                failed[name] = outcome
    return failed


def measured_raw_read(path: Path, notes: list[str]) -> list[RawRead]:
    try:
        return [raw_read(path)]
    except OSError as error:
        note(notes, f"no raw read rate: {error}")
        return []


def one_run(
    name: str,
    repeat: int,
    asked: StreamedRun,
    options: argparse.Namespace,
    controller: Controller | str,
    model: StreamedModel,
    notes: list[str],
) -> Outcome:
    """Return the outcome of one process, run from a cold page cache in a memory group of its own."""
    note(notes, f"before each run {drop_caches(model.files())}")
    cached, load = cached_share(model.files()), os.getloadavg()[0]
    command, log = command_of(name, asked, options), options.output / f"{name}-{repeat + 1}.log"
    if isinstance(controller, str):
        outcome = run_process(command, None, log, options.timeout)
    else:
        group = MemoryGroup.create(controller, f"graphcore-compare-{os.getpid()}-{time.monotonic_ns()}", options.limit)
        try:
            outcome = run_process(command, group, log, options.timeout)
        finally:
            group.remove()
    outcome.cached_before, outcome.load_average_before = cached, load
    return outcome


def note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)


if __name__ == "__main__":
    main()
