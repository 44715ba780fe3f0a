"""Settings that tests compose from kept groups are those that Hydra composes, and so are messages."""

from collections.abc import Callable, Sequence

import hydra
import pytest
from omegaconf import DictConfig
from support.task_runs import compose_groups_once

from graphcore.config.compose import compose_settings
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError

OVERRIDES = (
    "",
    "model=gemma3 dtype=bf16 ++model.random_config.hidden_size=64",
    "model=gemma3 dtype=bf16 ++model.random_config.hidden_size=32 context_length=64",
    "task=serve task.port=1 streaming=on streaming.source=host prompt_ids=[1,2]",
    "streaming.policy=off streaming=on",
    "model.adapter='[/a:0.5,/b]' stop=['a','b'] cache_dir=/x hydra.run.dir=/y",
    "seed=3 seed=4 model.random_config={hidden_size:3}",
    "quant=q8_0 quant.kv=null",
    "task.port=1",
    "seed=x",
    "seed=1,2",
    "model=llama3,qwen3",
    "~model",
    "+new=1",
    "model=nosuch",
)


def outcome(
    compose: Callable[[str, Sequence[str]], DictConfig], overrides: str, monkeypatch: pytest.MonkeyPatch
) -> Settings | str:
    """Return the settings or the message that come of overrides."""
    monkeypatch.setattr("graphcore.config.compose.compose", compose)
    try:
        return compose_settings(overrides.split())
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_settings_and_messages_are_hydra_s(overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome(hydra.compose, overrides, monkeypatch)
    for _ in range(2):  # the second from what is kept
        assert outcome(compose_groups_once, overrides, monkeypatch) == expected
