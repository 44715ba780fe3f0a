"""Running a task in this process, from overrides to result.json, with groups that are composed once."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from graphcore.cli.single_run import run_job
from graphcore.config.compose import VERSION_BASE, register_schemas
from graphcore.config.conf_folder import conf_dir, group_options
from graphcore.errors import GraphcoreError

# Hydra's `compose`, but each choice of groups is composed once in a process: that takes 0.1 s, and a tiny model less.
#
#     model=gemma3 graph=eager context_length=64
#     ^^^^^^^^^^^^^^^^^^^^^^^^ composed once    ^ applied to a copy, by Hydra's own function for it


@cache
def parsed(override: str) -> Override:
    """Return what Hydra reads in an override."""
    (found,) = OverridesParser.create().parse_overrides([override])
    return found


@cache
def composed_groups(config_name: str, choices: tuple[str, ...], search_path: str) -> DictConfig:
    """Return the config of some choices of groups in the folders of Hydra's search path; it must not be changed."""
    return compose(config_name, list(choices))


@cache
def groups() -> frozenset[str]:
    """Return the names of the groups of conf/."""
    return frozenset(group_options())


def compose_groups_once(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra's `compose` returns.

    What cannot be applied to a copy, sweeps and settings of Hydra itself for example, is left to Hydra, and so are all
    messages about overrides that are wrong.
    """
    try:
        found = [parsed(override) for override in overrides]
        if any(one.is_sweep_override() or one.is_delete() for one in found):
            return compose(config_name, list(overrides))
        choices = tuple(str(one.input_line) for one in found if one.key_or_group in groups())
        search_path = str(GlobalHydra.instance().config_loader().get_search_path())
        config = deepcopy(composed_groups(config_name, choices, search_path))
        ConfigLoaderImpl._apply_overrides_to_config([one for one in found if one.key_or_group not in groups()], config)
        return config
    except (HydraException, OmegaConfBaseException):
        return compose(config_name, list(overrides))


# Running a task in this process, from overrides to result.json.

NEW = 10  # most tokens of an answer in a chat


@dataclass(frozen=True)
class TaskRun:
    """What one run of a task left: exit status, result.json, and the error that it raised."""

    status: int
    record: dict[str, Any]
    error: GraphcoreError | None


RunTask = Callable[..., TaskRun]


@cache
def composed(*overrides: str) -> DictConfig:
    """Return what conf/ and the overrides give; composing takes longer than most of these runs."""
    register_schemas()
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        return compose_groups_once("config", overrides)


def run_in(folder: Path, *overrides: str) -> TaskRun:
    """Run a task into a folder; eager and quiet unless the overrides say otherwise."""
    status, error = 1, None
    try:
        status = run_job(deepcopy(composed("graph=eager", "device=cpu", "progress=false", *overrides)), folder)
    except GraphcoreError as raised:
        error = raised
    return TaskRun(status, json.loads((folder / "result.json").read_text(encoding="utf-8")), error)
