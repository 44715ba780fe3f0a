"""Streaming's keys: edges pass, the first value beyond is refused, and so is what would have no effect."""

import pytest
from omegaconf import OmegaConf

from graphcore.config.compose import compose_settings
from graphcore.config.conf_folder import conf_dir
from graphcore.config.settings import KEPT
from graphcore.errors import ConfigError

REFUSED = [
    (
        "streaming.policy=maybe",
        f"streaming.policy=maybe is not one of {', '.join(KEPT)}",
    ),
    ("streaming=on streaming.mode=fast", "streaming.mode=fast is not one of async, sync"),
    ("streaming=on streaming.source=tape", "streaming.source=tape is not one of auto, host, disk"),
    (
        "streaming=on streaming.layer_group_size=0",
        "size=0 must be auto or a whole number of layers, at least 1",
    ),
    (
        "streaming=on streaming.layer_group_size=two",
        "size=two must be auto or a whole number of layers",
    ),
    ("streaming=on streaming.pinned_memory=maybe", "streaming.pinned_memory=maybe must be true or false"),
    ("streaming=on streaming.prefetch=-1", "streaming.prefetch=-1 must be auto or a whole number from 0 to 8"),
    ("streaming=on streaming.prefetch=9", "streaming.prefetch=9 must be auto or a whole number from 0 to 8"),
    ("streaming=on streaming.prefetch=1.5", "streaming.prefetch=1.5 must be auto or a whole number"),
    ("streaming=on streaming.prefetch=true", "streaming.prefetch=True must be auto or a whole number"),
    ("streaming=on streaming.prefetch=null", "streaming.prefetch=None must be auto or a whole number"),
    ("streaming=on streaming.mode=sync streaming.prefetch=1", "streaming.prefetch=1 contradicts streaming.mode=sync"),
    ("streaming=on streaming.memory_budget=0", "streaming.memory_budget=0 must be auto or more than 0 bytes"),
    ("streaming=on streaming.memory_budget=lots", "streaming.memory_budget=lots is no size"),
    ("streaming=on streaming.memory_budget=null", "streaming.memory_budget=None is no size"),
    ("streaming=on streaming.memory_budget=[1]", "streaming.memory_budget=[1] is no size"),
    ("streaming.memory_budget=14", "streaming.memory_budget=14 would be 14 bytes"),
    ("streaming=on streaming.kv_memory_budget=-1", "streaming.kv_memory_budget=-1 is no size"),
    ("streaming=on streaming.host_memory_budget=0MB", "streaming.host_memory_budget=0MB must be auto or more"),
    ("streaming=auto streaming.expert_cache=-5GiB", "streaming.expert_cache=-5GiB is no size"),
    ("trace=yes,no", "trace"),
]
ALLOWED = [
    "streaming=on streaming.prefetch=0 streaming.layer_group_size=1 streaming.memory_budget=1024",
    "streaming=on streaming.prefetch=8 streaming.expert_cache=0 streaming.host_memory_budget=1B",
    "streaming=auto streaming.mode=sync streaming.prefetch=0 streaming.source=disk trace=true",
    "streaming=auto streaming.mode=sync streaming.pinned_memory=false streaming.memory_budget=1e9",
    "streaming=off streaming.memory_budget=14GiB",
    "streaming=auto streaming.kv_memory_budget=0",
]
WITHOUT_EFFECT = [
    ("streaming.layer_group_size", "2"),
    ("streaming.host_memory_budget", "1GB"),
    ("streaming.kv_memory_budget", "1GB"),
    ("streaming.pinned_memory", "false"),
    ("streaming.prefetch", "0"),
    ("streaming.mode", "sync"),
    ("streaming.source", "disk"),
    ("streaming.expert_cache", "0"),
    ("trace", "true"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_a_value_out_of_range_is_refused(overrides: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_settings(overrides.split(" "))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("overrides", ALLOWED)
def test_a_value_at_the_edge_is_taken(overrides: str) -> None:
    compose_settings(overrides.split(" "))


@pytest.mark.parametrize(("key", "value"), WITHOUT_EFFECT)
def test_what_has_no_effect_with_streaming_off_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} has no effect with streaming=off; "):
        compose_settings([f"{key}={value}"])
    compose_settings([f"{key}={value}", "streaming=on"])


def test_every_key_but_policy_and_budget_is_tried_with_streaming_off() -> None:
    keys = set(OmegaConf.load(conf_dir() / "streaming" / "off.yaml"))
    tried = {key.removeprefix("streaming.") for key, _ in WITHOUT_EFFECT}
    assert keys == tried - {"trace"} | {"policy", "memory_budget"}


def test_the_three_options_differ_in_their_policy_alone() -> None:
    options = {name: OmegaConf.load(conf_dir() / "streaming" / f"{name}.yaml") for name in ("off", "on", "auto")}
    assert {name: one.pop("policy") for name, one in options.items()} == {name: name for name in options}
    assert options["on"] == options["auto"] == options["off"]


def test_a_size_with_a_space_may_be_typed() -> None:
    assert compose_settings(["streaming=on", "streaming.memory_budget=1.5 GB"]).streaming.memory_budget == "1.5 GB"
