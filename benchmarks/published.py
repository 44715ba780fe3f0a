"""Published checkpoints against transformers: downloaded, compared, timed, and a table to paste.

    python -m benchmarks.published                             the six of DEFAULT, 24 GB to download
    python -m benchmarks.published phi4_mini olmo2             other groups of conf/model
    python -m benchmarks.published llama3 dtype=bf16 device=cpu   the same settings for all

For each model, the author's own checkpoint if the group has it (model.precision=full), one process after the other:

    task=verify    whole logits and layers beside transformers' in float32, then 32 greedy tokens
    task=bench     tokens/s of a prompt and of decode, peak memory

It needs a network (HF_TOKEN for models whose page asks for consent) and RAM for the model in float32. Where that is too
little for all layers, the first `LAYERS` are compared, and the table says so; the speeds are the whole model's. The
exit status is 1 if a model differs or does not run. `pytest -m hub` asserts the same of each group.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphcore.config.byte_sizes import in_words
from graphcore.config.conf_folder import group_options, published_models

ROOT = Path(__file__).parents[1]
DEFAULT = ("llama3", "qwen3", "gemma3_1b", "gpt2", "gpt_oss", "bitnet")
LAYERS = 2
COLUMNS = (
    *("model", "checkpoint", "device", "dtype", "graph", "verify", "layers", "largest error (allowed)", "cosine"),
    *("greedy tokens as transformers'", "prompt tokens/s", "decode tokens/s", "peak memory"),
)

Record = dict[str, Any]


def main() -> int:
    options = parse_options()
    names = [one for one in options.names if "=" not in one]
    overrides = [one for one in options.names if "=" in one]
    models = sorted(group_options()["model"]) if options.all else names or list(DEFAULT)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    is_right = True
    precisions = {
        one.name: one.precision for one in sorted(published_models(), key=lambda one: one.precision == "full")
    }
    for model in models:
        verified, timed = check(model, [f"model.precision={precisions[model]}", *overrides])
        print(f"| {' | '.join(row(model, verified, timed))} |", flush=True)
        is_right &= verified["status"] == timed["status"] == "ok"
    return 0 if is_right else 1


def check(model: str, overrides: Sequence[str]) -> tuple[Record, Record]:
    """Return result.json of task=verify and of task=bench."""
    verified = run(model, "verify", overrides)
    if "model.num_hidden_layers=" in (verified["error"] or ""):  # all layers in float32 do not fit, it says
        verified = run(model, "verify", [*overrides, f"model.num_hidden_layers={LAYERS}"])
    return verified, run(model, "bench", overrides)


def run(model: str, task: str, overrides: Sequence[str]) -> Record:
    """Run a task in a process of its own and return its result.json; its output goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "run.py"), f"model={model}", f"task={task}", *overrides]
        done = subprocess.run([*command, f"hydra.run.dir={folder}"], stdout=sys.stderr, check=False)
        result = Path(folder) / "result.json"
        if not result.exists():
            return {"status": "failed", "error": f"task={task} ended with status {done.returncode}"}
        record: Record = json.loads(result.read_text(encoding="utf-8"))
        return record


def row(model: str, verified: Record, timed: Record) -> list[str]:
    """Return the cells of a model's row; what did not run says why in place of its figures."""
    if "logits" in verified:
        logits, greedy = verified["logits"], verified["greedy"]
        num_layers = len(verified["layers"]) - 1  # the first is the embedding
        of_verify = [
            *(verified["device"], verified["dtype"], verified["graph"]["kind"], verified["status"], str(num_layers)),
            *(f"{logits['max']:.1e} ({verified['tolerance']:.1e})", f"{logits['cosine']:.7f}"),
            f"{greedy['agreeing']} of {greedy['tokens']}",
        ]
    else:
        of_verify = ["", "", "", one_line(verified["error"]), "", "", "", ""]
    if "decode" in timed:
        speeds = [f"{timed[phase]['tokens_per_second']:.1f}" for phase in ("prefill", "decode")]
        of_bench = [*speeds, in_words(timed["memory"]["peak_device_bytes"])]
    else:
        of_bench = [one_line(timed["error"]), "", ""]
    found = [one["model"] for one in (verified, timed) if one.get("model")]
    return [model, str(found[0]["source"]) if found else "", *of_verify, *of_bench]


def one_line(error: str | None) -> str:
    """Return an error as a cell of a table."""
    return " ".join((error or "no result").split()).replace("|", "/")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="groups of conf/model, and settings for all runs")
    parser.add_argument("--all", action="store_true", help="every group of conf/model")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
