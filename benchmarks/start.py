"""Time from the start of a command's process to its first token, as a user waits for it.

Commands and `import torch` alone, which every answer needs, run alternately. A first start has an empty cache folder
and the model's file in another place: no download is counted, and no compiler runs if pip has built the kernels.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cases import prepare
from reporting import spread

ROOT = Path(__file__).parents[1]
RUN = (sys.executable, str(ROOT / "run.py"))
PROMPT = ("prompt=Say hello.", "max_new_tokens=4", "progress=false")
OTHERS = {
    "import torch": (sys.executable, "-c", "import torch; print(1)"),
    "--help": (*RUN, "--help"),
    "a typo": (*RUN, "straeming=on"),
    "a wrong path": (*RUN, "model.checkpoint=/nowhere/model.gguf"),
}


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        commands: dict[str, tuple[str, ...]] = dict(OTHERS)
        for model in options.models:
            _, path = prepare(model, None)
            place = (f"model.checkpoint={path}", f"hydra.run.dir={folder}/run", *PROMPT)
            commands[f"{model}, warm"] = (*RUN, *place)
            commands[f"{model}, first"] = (*RUN, *place, f"cache_dir={folder}/cache")
        for command in commands.values():
            seconds_to_output(command)  # not counted: reads files into the page cache, fills the cache folder
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.repeats):
            for name, command in commands.items():
                shutil.rmtree(f"{folder}/cache", ignore_errors=True)
                seconds[name].append(seconds_to_output(command))
    report(seconds)


def seconds_to_output(command: Sequence[str]) -> float:
    """Return the seconds to the first byte on standard output, or to the process's end if it prints nothing."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        assert process.stdout is not None, "a pipe was asked for"
        process.stdout.read(1)
        took = time.perf_counter() - began
        process.stdout.read()
    return took


def report(seconds: dict[str, list[float]]) -> None:
    torch = spread(seconds["import torch"])["median"]
    print("| seconds to the first output | median | smallest | largest | x `import torch` |\n|---|---|---|---|---|")
    for name, values in seconds.items():
        row = spread(values)
        cells = [f"{row[key]:.2f}" for key in ("median", "min", "max")]
        print(f"| {name} | {' | '.join(cells)} | {row['median'] / torch:.2f} |")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"], help="names of cases, or paths")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
