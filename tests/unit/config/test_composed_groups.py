"""Settings that are composed from kept groups are those that Hydra composes anew, and so are messages."""

from collections.abc import Callable, Sequence

import hydra
import pytest
from omegaconf import DictConfig
from support.cases import in_case

from graphcore.config.compose import compose_config, compose_settings
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
    compose: Callable[[Sequence[str]], DictConfig], overrides: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> Settings | str:
    """Return the settings or the message that come of overrides."""
    monkeypatch.setattr("graphcore.config.compose.compose_config", compose)
    try:
        return compose_settings(overrides)
    except ConfigError as error:
        return str(error)


def test_settings_and_messages_are_hydra_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in OVERRIDES:
        overrides = line.split()
        expected = outcome(lambda given: hydra.compose("config", list(given)), overrides, monkeypatch)
        for _ in range(2):  # the second from what is kept
            with in_case(line):
                assert outcome(compose_config, overrides, monkeypatch) == expected


def test_a_choice_of_groups_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = []

    def counted(name: str, overrides: list[str]) -> DictConfig:
        composed.append(overrides)
        return hydra.compose(name, overrides)

    monkeypatch.setattr("graphcore.config.compose.compose", counted)
    for seed in range(3):
        assert compose_settings(["model=starcoder2", "quant=q5_0", "dtype=fp32", f"seed={seed}"]).seed == seed
    assert composed == [["model=starcoder2", "quant=q5_0", "dtype=fp32"]]
