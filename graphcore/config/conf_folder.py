"""The folder of the yaml files: where it is, and which options each group has."""

import re
from collections.abc import Iterable
from pathlib import Path

from graphcore.errors import ConfigError
from graphcore.registry import nearest

OPTION_LIST = re.compile(r"[\w-]*(,[\w-]+)*")  # one option, or several in a sweep
SENTENCE = re.compile(r"[^\s()\[\]{}$'\"]+\s[^()\[\]{}$'\"]*")  # words; what Hydra's grammar has for several is none


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
    """Return if every "group=option" among the overrides names an option that is there.

    Hydra's own message is long, and for group=true it is none at all.

    Raises:
        ConfigError: one does not; the message lists the group's options.
    """
    groups = group_options()
    for override in overrides:
        written, separator, value = override.partition("=")
        group = written.lstrip("+~")
        if group not in groups:
            continue
        if written.startswith("~"):
            raise ConfigError(f"{written} would take away what every run needs; leave it out", is_unknown=True)
        if SENTENCE.fullmatch(value):
            known = ", ".join(groups[group])
            advice = f"a prompt with a = in it is written prompt={override!r}"
            raise ConfigError(f"{override} is no option of this group; known: {known}; {advice}", is_unknown=True)
        if not separator or not OPTION_LIST.fullmatch(value):
            continue
        unknown = [option for option in value.split(",") if option not in groups[group]]
        if unknown and not (group == "experiment" and unknown == ["null"]):
            known = ", ".join(groups[group]) or "none yet"
            # A model that is not there is another one, and no misspelling of the one whose name is like its own.
            likely = "" if group == "model" else nearest(unknown[0], groups[group])
            raise ConfigError(
                f"{group}={unknown[0]} is no option of this group{likely}; known: {known}",
                is_unknown=True,
            )
