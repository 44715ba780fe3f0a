"""Composes conf/ and overrides into `Settings`; of other packages only cli/ handles Hydra's and OmegaConf's configs."""

import itertools
import os
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphcore.config.byte_sizes import in_words
from graphcore.config.conf_folder import check_groups, conf_dir, group_options
from graphcore.config.hydra_errors import config_error, unknown_key
from graphcore.config.settings import Settings
from graphcore.config.validate import kv_names, unknown_choice, validate_settings
from graphcore.errors import ConfigError
from graphcore.registry import nearest

VERSION_BASE = "1.3"
SETTING = (OverrideType.CHANGE, OverrideType.FORCE_ADD)  # kinds of overrides that set a value: key=3, ++key=3
PRECISIONS = ("q4", "full")  # of published checkpoints: a file of 4 bits, and the author's own
T = TypeVar("T")

_composing = threading.Lock()  # Hydra has one state for all threads of a process


@cache
def register_schemas() -> None:
    """Register the types that conf/config.yaml extends, and the resolver by which Hydra makes a folder or none."""
    ConfigStore.instance().store(name="settings_schema", node=Settings)
    OmegaConf.register_new_resolver("with_outputs", _with_outputs, replace=True)


def _with_outputs(folder: str, otherwise: str | None, *, _root_: DictConfig) -> str | None:
    """Return `folder` if this process writes results, else `otherwise`.

    It does with outputs=true, unless it is a rank that follows; an absent `outputs`, as in `--cfg hydra`, counts as
    true.
    """
    return folder if OmegaConf.select(_root_, "outputs", default=True) and not follows(_root_) else otherwise


def follows(composed: DictConfig) -> bool:
    """Return whether this process is a rank of a ring that follows rank 0, and so runs no task and writes no result."""
    return OmegaConf.select(composed, "parallel.kind") == "ring" and os.environ.get("RANK", "0") != "0"


def compose_settings(overrides: Sequence[str]) -> Settings:
    """Return the checked settings that conf/ and the overrides give.

    Args:
        overrides: settings as on the command line, such as "model=gemma3" or "sampling.temperature=0.7".

    Raises:
        ConfigError: an override names no key, has the wrong type, or a value is out of range.
    """
    with _composing:
        return _compose(overrides)


def _compose(overrides: Sequence[str]) -> Settings:
    refuse_deletions(overrides)
    check_groups(overrides)
    register_schemas()
    was_initialised = GlobalHydra.instance().is_initialized()
    try:
        if was_initialised:  # inside a Hydra application, whose own search path includes conf/
            return to_settings(compose_config(overrides))
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
            return to_settings(compose_config(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise config_error(error) from error


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra's `compose` returns; a process composes each choice of groups once, because it takes 0.1 s.

        model=gemma3 dtype=bf16 context_length=64 sampling.temperature=0.7
        ^^^^^^^^^^^^^^^^^^^^^^^ composed once      ^ set in a copy, as long as Hydra has nothing to say about it

    Hydra has to be initialised. Sweeps, keys to add or to delete, and all that is wrong are left to Hydra.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        groups = group_options()
        values = [one for one in parsed if one.key_or_group not in groups]
        chosen = tuple(str(one.input_line) for one in parsed if one.key_or_group in groups)
        if not all(one.type in SETTING and one.package is None for one in values):
            return compose("config", list(overrides))
        search_path = str(GlobalHydra.instance().config_loader().get_search_path())
        config = deepcopy(_composed_groups(search_path, chosen))
        for one in values:
            OmegaConf.update(config, one.key_or_group, one.value(), force_add=one.is_force_add())
        return config
    except (HydraException, OmegaConfBaseException):
        return compose("config", list(overrides))  # its message is about all overrides


@cache
def _composed_groups(search_path: str, chosen: tuple[str, ...]) -> DictConfig:  # noqa: ARG001 - a key of the cache
    """Return the config of a choice of groups, such as "model=gemma3"; callers change only copies of it.

    Args:
        search_path: folders in which Hydra looks for groups.
    """
    return compose("config", list(chosen))


def check_sweep(overrides: Sequence[str]) -> None:
    """Check that every job of a sweep composes; values out of range are left to the job that has them.

    Hydra checks this too, but only after it has created the sweep's folder.

    Raises:
        ConfigError: an override names no key or has the wrong type, or Hydra lacks the kind of sweep.
    """
    register_schemas()
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        swept = [override for override in parsed if override.is_sweep_override()]
        if not all(override.is_discrete_sweep() for override in swept):
            raise ConfigError("a sweep needs values with commas, such as dtype=fp32,bf16, or range(1,4)")
        fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
        values = [
            [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            for override in swept
        ]
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
            for job in itertools.product(*values):
                if not compose("config", [*fixed, *job], return_hydra_config=True).outputs:
                    raise ConfigError("outputs=false has no effect with a sweep, whose results are files; leave it out")
    except (HydraException, OmegaConfBaseException) as error:
        raise config_error(error) from error


def refuse_deletions(overrides: Sequence[str]) -> None:
    """Check that no override takes a setting away (~key): every run has all of them.

    Keys that a user may add and take away, such as those of model.random_config, are left to Hydra.

    Raises:
        ConfigError: an override takes a setting away.
    """
    for override in overrides:
        if not override.startswith("~"):
            continue
        path = override[1:].partition("=")[0]
        kind: Any = Settings
        for part in path.split("."):
            kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
        if kind is not None or path in group_options():
            instead = f", or write {path}=null" if type(None) in get_args(kind) else ""
            advice = f"leave it out{instead}"
            raise ConfigError(f"{override} would remove settings that every run needs; {advice}", is_unknown=True)


def to_settings(composed: DictConfig) -> Settings:
    """Return the checked and typed settings of a composed config.

    Raises:
        ConfigError: a value is missing, of the wrong type, or out of range, or a key was added that nothing reads.
    """
    refuse_added_keys(composed, "")
    try:
        check_precision(composed.model)
        settings = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise config_error(error) from error
    assert isinstance(settings, Settings), f"the root config is {type(settings).__name__}"
    spell_switches(settings)
    validate_settings(settings)
    settings.kv_dtype = ",".join(dict.fromkeys(kv_names(settings.kv_dtype)))
    return settings


def check_precision(model: DictConfig) -> None:
    """Check that the model has a file of the precision that is asked for, from which `published` is resolved.

    Raises:
        ConfigError: it has none.
    """
    if model.precision in model.files:
        return
    if model.precision not in PRECISIONS:
        raise unknown_choice("model.precision", model.precision, tuple(model.files))
    other = next(iter(model.files))
    own = ", or name a file: model.checkpoint=hf:org/name:Q4_K_M" if model.precision == "q4" else ""
    raise ConfigError(
        f"model.precision={model.precision}: no such file of {model.name} is known; use model.precision={other} "
        f"({in_words(model.files[other].nbytes)}){own}"
    )


def refuse_added_keys(node: DictConfig, prefix: str) -> None:
    """Check that no node of a known class has a key that its class lacks (+key=value adds one).

    Raises:
        ConfigError: a node has such a key.
    """
    schema = OmegaConf.get_type(node)
    if not is_dataclass(schema):
        return
    known = {field.name for field in fields(schema)}
    for key in map(str, node):
        if key not in known:
            raise ConfigError(unknown_key(prefix + key), is_unknown=True)
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            refuse_added_keys(child, f"{prefix}{key}.")


def spell_switches(settings: Settings) -> None:
    """Write "on" and "off" again where yaml has read them as booleans."""
    spelt = {"True": "on", "False": "off"}
    settings.chat = spelt.get(settings.chat, settings.chat)
    settings.streaming.policy = spelt.get(settings.streaming.policy, settings.streaming.policy)


def merge_schema(schema: type[T], values: dict[str, Any], where: str) -> T:
    """Return an instance of a dataclass with the given values, types checked.

    Args:
        schema: a dataclass whose fields have no default.
        values: a mapping of plain values.
        where: the key that holds them, for messages.

    Raises:
        ConfigError: a value is missing, unknown or of the wrong type.
    """
    assert is_dataclass(schema), f"{schema.__name__} is no dataclass"
    known = [field.name for field in fields(schema)]
    unknown = next((key for key in values if key not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"{where} has no key '{unknown}'{nearest(unknown, known)}; known: {', '.join(known)}", is_unknown=True
        )
    try:
        merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(values)))
    except OmegaConfBaseException as error:
        raise config_error(error, where) from error
    assert isinstance(merged, schema), f"{where} is {type(merged).__name__}"
    return merged
