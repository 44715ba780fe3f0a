"""Time from the start of a process to its first token: an 8B model from the page cache, the first time and again."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from graphcore.arch.weight_map import get_weight_map
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import Model, open_model
from suite.bench import Bench
from suite.log import Measurement

RUN = Path(__file__).parents[2] / "run.py"
LAYERS_A_FILE = 4
TIMEOUT = 180  # seconds of one process


def run(bench: Bench) -> None:
    folder = Path(tempfile.mkdtemp(prefix="graphcore-suite-"))
    try:
        write_checkpoint(bench, folder / "model")
        for state in ("warm",) if bench.is_dry else ("cold", "warm"):
            first_token_row(bench, folder, state)
    finally:
        shutil.rmtree(folder)


def write_checkpoint(bench: Bench, folder: Path) -> None:
    """Write a Hugging Face folder of random bf16 weights; what was just written is in the page cache."""
    folder.mkdir()
    settings = compose_settings(bench.settings("llama3_8b", "random:bf16"))
    model = open_model(settings.model, 0, folder, lambda *_: None)
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **settings.model.random_config}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index: dict[str, str] = {}
    for number, names in enumerate(files_of(model)):
        file = f"model-{number:05}.safetensors"
        save_file({name: model.checkpoint.read(own) for name, own in names.items()}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    whole = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole), encoding="utf-8")


def files_of(model: Model) -> list[dict[str, str]]:
    """Return for each file Hugging Face's names and the decoder's own."""
    files: dict[int, dict[str, str]] = {}
    for name, own in get_weight_map(model.config).items():
        layer = int(own.split(".")[1]) if own.startswith("layers.") else -1
        files.setdefault(layer // LAYERS_A_FILE, {})[name] = own
    return list(files.values())


def first_token_row(bench: Bench, folder: Path, state: str) -> None:
    """Run task=bench in a process of its own; cold is with an empty cache folder, as nobody has it twice."""
    where = ["device=cpu", "graph=eager"] if bench.is_dry else ["device=cuda:0"]
    sizes = ["task.prompt_tokens=16", "task.new_tokens=1", "task.repeats=1", "context_length=128"]
    output = folder / state
    cache = [] if bench.is_dry else [f"cache_dir={folder / 'cache'}"]
    command = [
        *(sys.executable, str(RUN), "task=bench", f"model.checkpoint={folder / 'model'}", f"hydra.run.dir={output}"),
        *("progress=false", *cache, *where, *sizes),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"task=bench ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    record = json.loads((output / "result.json").read_text(encoding="utf-8"))
    seconds = record["process_to_first_token_seconds"]
    row = Measurement(f"8B bf16 from the page cache to the first token, {state}", "s", [seconds])
    row.details |= {"load_seconds": record["load_seconds"], "compile": record["compile"], "memory": record["memory"]}
    row.note = f"loading took {record['load_seconds']:.1f} s, compiling {record['compile']['seconds']:.1f} s"
    if state == "warm":
        row.aim("under 30 s", seconds < 30)
    bench.log.add(row)
