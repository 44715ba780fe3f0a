"""conf/ and overrides to `Settings`: the one place where Hydra's and OmegaConf's types are known."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphcore.config.messages import one_line
from graphcore.config.settings import Settings
from graphcore.config.validate import check
from graphcore.errors import ConfigError

VERSION_BASE = "1.3"
T = TypeVar("T")


def conf_dir() -> Path:
    """Return the folder of the yaml files: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def register_schemas() -> None:
    """Tell Hydra the types that conf/config.yaml extends."""
    ConfigStore.instance().store(name="settings_schema", node=Settings)


def compose_settings(overrides: Sequence[str]) -> Settings:
    """Return the settings that conf/ and the overrides give, checked.

    Args:
        overrides: as on the command line, such as "model=gemma3" or "sampling.temperature=0.7".

    Raises:
        ConfigError: an override names no key, has the wrong type, or a value is out of range.
    """
    register_schemas()
    was_initialised = GlobalHydra.instance().is_initialized()
    try:
        if was_initialised:  # inside a Hydra application: its own search path has conf/
            return to_settings(compose("config", list(overrides)))
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
            return to_settings(compose("config", list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from error


def to_settings(composed: DictConfig) -> Settings:
    """Return the typed settings of a composed config, checked.

    Raises:
        ConfigError: a value is missing, of the wrong type, or out of range.
    """
    try:
        settings = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    assert isinstance(settings, Settings), f"the root config is {type(settings).__name__}"
    check(settings)
    return settings


def merge_schema(schema: type[T], values: object, where: str) -> T:
    """Return an instance of a dataclass with the given values, types checked.

    Args:
        schema: a dataclass whose fields have no default.
        values: a mapping of plain values.
        where: the key that holds them, for messages.

    Raises:
        ConfigError: a value is missing, unknown or of the wrong type.
    """
    try:
        merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(values)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error
    assert isinstance(merged, schema), f"{where} is {type(merged).__name__}"
    return merged
