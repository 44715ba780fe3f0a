"""Models of published comparisons, by name, and the file that each engine loads, packed or downloaded if need be."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RUN = Path(__file__).parents[1] / "run.py"
LLAMA_1B = (
    "model=llama3",
    "model.checkpoint=random:",
    "model.random_config.rope_scaling=null",
    "model.random_config.max_position_embeddings=4096",
)
LLAMA_8B = (
    *LLAMA_1B,
    "model.random_config.hidden_size=4096",
    "model.random_config.intermediate_size=14336",
    "model.random_config.num_hidden_layers=32",
    "model.random_config.head_dim=128",
    "model.random_config.tie_word_embeddings=false",
)


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        overrides: settings of graphcore that name the model.
        packed_as: format that a file is packed as before anything runs; None takes the checkpoint as it is.
        has_peers: True if other engines load the file too.
    """

    overrides: tuple[str, ...]
    packed_as: str | None = None
    has_peers: bool = True


CASES = {
    "smollm2": Case(("model=smollm2",)),
    "gemma3": Case(("model=gemma3",)),
    "llama1b-q4_k": Case(LLAMA_1B, "q4_k"),
    "llama1b-q8_0": Case(LLAMA_1B, "q8_0"),
    "llama8b-q4_k": Case(LLAMA_8B, "q4_k"),
    "bitnet2b": Case(("model=bitnet", "model.checkpoint=random:"), has_peers=False),
}


def overrides_of(model: str, num_layers: int | None) -> list[str]:
    """Return graphcore's settings that select the model of a case, a model group, or a path."""
    if model in CASES:
        chosen = list(CASES[model].overrides)
    elif Path(model).exists():
        chosen = [f"model.checkpoint={Path(model).resolve()}"]
    else:
        chosen = [f"model={model}"]
    return chosen + ([f"model.num_hidden_layers={num_layers}"] if num_layers else [])


def prepare(model: str, num_layers: int | None) -> tuple[list[str], Path | None]:
    """Return graphcore's settings, and the file for its peers; None where there is no file that they load.

    A random model is packed into a file once, in benchmarks/ of graphcore's cache folder.
    """
    from graphcore.checkpoint.sources.fetch import resolve_source
    from graphcore.config.compose import compose_settings

    if num_layers and "model.checkpoint=random:" not in overrides_of(model, None):
        raise SystemExit(f"--num-layers cuts random models only, and {model} is a file that its peers would read whole")
    overrides = overrides_of(model, num_layers)
    settings = compose_settings(overrides)
    cache_dir = settings.cache_folder
    case = CASES.get(model)
    if case is not None and case.packed_as is not None:
        path = packed_file(cache_dir / "benchmarks", model, case.packed_as, overrides)
        return [f"model.checkpoint={path}"], path
    if case is not None and not case.has_peers:
        return overrides, None
    return overrides, resolve_source(settings.model.checkpoint, cache_dir, settings.model.expected_sha256)


def packed_file(folder: Path, model: str, packed_as: str, overrides: list[str]) -> Path:
    """Return the packed file of a random model, written now if it is not there."""
    layers = next((part.partition("=")[2] for part in overrides if part.startswith("model.num_hidden")), "all")
    path = folder / f"{model}-{layers}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(".part")
        task = ["task=pack", f"quant={packed_as}", f"task.output={made}", "task.overwrite=true"]
        where = f"hydra.run.dir={folder / 'pack'}"
        subprocess.run([sys.executable, str(RUN), *overrides, *task, where], check=True, stdout=sys.stderr)
        made.replace(path)
    return path
