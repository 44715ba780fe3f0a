"""The folder of the yaml files: where it is, and which options each group has."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from graphcore.config.dtype_names import OTHER_NAMES
from graphcore.errors import ConfigError
from graphcore.registry import nearest

OPTION_LIST = re.compile(r"[\w.-]*(,[\w.-]+)*")  # one option, or several in a sweep or in [a,b]
CHECKPOINT = re.compile(r"(hf|pypi|random):.*|.*[/\\].*|.*\.(gguf|safetensors)")  # a path or source, not a name
OTHER_WORDS = {  # from yaml and other engines
    **dict.fromkeys(("true", "yes"), "on"),
    **dict.fromkeys(("false", "no", "none"), "off"),
    **OTHER_NAMES,
}
MODEL_LIKENESS = 0.75  # least similarity of a misspelt model's name; names of different models reach about 0.6
SENTENCE = re.compile(r"[^\s()\[\]{}$'\"]+\s[^()\[\]{}$'\"]*")  # words; none in a list or other syntax of Hydra's


def conf_dir() -> Path:
    """Return the folder of the yaml files: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def group_options() -> dict[str, list[str]]:
    """Return the options of each config group."""
    folders = sorted(folder for folder in conf_dir().iterdir() if folder.is_dir())
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def check_groups(overrides: Iterable[str]) -> None:
    """Check that every "group=option" among the overrides names an existing option.

    Hydra's own message is long, and for values that are no text, such as true, 1.5 or null, there is none.

    Raises:
        ConfigError: an option does not exist; the message lists the group's options.
    """
    groups = group_options()
    for override in overrides:
        written, separator, value = override.partition("=")
        group = written.lstrip("+~")
        if group not in groups:
            continue
        if SENTENCE.fullmatch(value):
            known = ", ".join(groups[group])
            advice = f"a prompt with a = in it is written prompt={override!r}"
            raise ConfigError(f"{override} is no option of this group; known: {known}; {advice}", is_unknown=True)
        if group == "model" and CHECKPOINT.fullmatch(value):
            advice = f"a file, a folder or a download is model.checkpoint={value}"
            known = ", ".join(groups[group])
            raise ConfigError(f"{override} is no option of this group; {advice}; known: {known}", is_unknown=True)
        options = value[1:-1] if value.startswith("[") and value.endswith("]") else value
        if not separator or value == "[]" or not OPTION_LIST.fullmatch(options):
            continue
        unknown = [option for option in options.split(",") if option not in groups[group]]
        if unknown:
            known = ", ".join(groups[group]) or "none yet"
            likely = likely_option(group, unknown[0], groups[group])
            raise ConfigError(
                f"{group}={unknown[0]} is no option of this group{likely}; known: {known}",
                is_unknown=True,
            )


def likely_option(group: str, written: str, options: list[str]) -> str:
    """Return " (did you mean 'x'?)" for the option that was probably meant, or other advice; else an empty string.

    A model's numbers are its version and size: with other numbers the name is another model's, and no misspelling.
    """
    if group == "experiment" and written in ("", "null"):
        return " (leave it out for none)"
    if group != "model":
        return nearest(OTHER_WORDS.get(written.lower(), written), options)
    numbers = re.findall(r"\d+", written)
    alike = [option for option in options if not numbers or re.findall(r"\d+", option) == numbers]
    return nearest(written, alike, MODEL_LIKENESS)


@dataclass(frozen=True)
class PublishedModel:
    """A checkpoint that a model group stands for.

    Attributes:
        name: str, the group's name: model=name.
        precision: str, q4 or full: model.precision=precision.
        is_default: bool, True if model=name alone stands for it.
        kind: str, chat or base.
        source: str, published location: hf:... or pypi:....
        licence: str, licence of the weights.
        nbytes: int, bytes of the weights, to download and on disk.
    """

    name: str
    precision: str
    is_default: bool
    kind: str
    source: str
    licence: str
    nbytes: int


def published_models() -> list[PublishedModel]:
    """Return the published checkpoints of every model group, sorted by name, the default of each first."""
    models = []
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        conf = OmegaConf.load(path)
        for precision in sorted(conf.files, key=lambda one: one != conf.precision):
            file, published = conf.files[precision], conf.published
            models.append(
                PublishedModel(
                    name=conf.name,
                    precision=precision,
                    is_default=precision == conf.precision,
                    kind=published.kind,
                    source=file.checkpoint,
                    licence=published.licence,
                    nbytes=file.nbytes,
                )
            )
    return models
