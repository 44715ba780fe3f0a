"""The table of sampling parameters and what is written by hand beside it: settings and their neutral values."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import yaml

from graphcore.config.compose import compose_settings
from graphcore.config.settings import SamplingSettings
from graphcore.errors import ConfigError
from graphcore.sampling_params import COLDEST, HOTTEST, MOST_KEPT, NEUTRAL, PARAMETERS, SamplingParams, check_sampling

SAMPLING = Path(__file__).parents[2] / "conf" / "sampling"


def test_settings_are_those_of_the_table_in_its_order() -> None:
    typed = {one.name: one.type for one in fields(SamplingParams) if one.name in PARAMETERS}
    # a dict that is null takes no keys
    optional = [one for one in fields(SamplingSettings) if one.name != "logit_bias"]
    settings = {one.name: get_args(one.type)[0] for one in fields(SamplingSettings)}
    assert all(get_args(one.type)[1] is type(None) for one in optional)
    assert [pair for pair in settings.items() if pair[0] in PARAMETERS] == list(typed.items())
    assert list(NEUTRAL) == [*settings, "seed"]
    assert set(NEUTRAL) - set(PARAMETERS) == {"logit_bias", "stop_token_ids", "dry_sequence_breakers", "seed"}


def test_greedy_settings_are_neutral() -> None:
    values = yaml.safe_load((SAMPLING / "greedy.yaml").read_text(encoding="utf-8"))
    assert SamplingParams(**values) == SamplingParams()
    assert [*values, "seed"] == list(NEUTRAL)


def test_the_default_leaves_every_setting_to_the_model() -> None:
    values = yaml.safe_load((SAMPLING / "auto.yaml").read_text(encoding="utf-8"))
    assert values == {**dict.fromkeys(name for name in NEUTRAL if name != "seed"), "logit_bias": {}}
    settings = compose_settings(["+sampling.logit_bias={12:-5}", "sampling.stop_token_ids=[1,2]"]).sampling
    assert settings.typed == {"logit_bias": {12: -5.0}, "stop_token_ids": [1, 2]}
    assert compose_settings([]).sampling.typed == {}


def test_sequence_breakers_have_bounds_that_the_message_names() -> None:
    for taken in ([], ["\n"], ["x" * 40], ["\n"] * 64):
        check_sampling({**NEUTRAL, "dry_sequence_breakers": taken})
    for refused, cure in ((["\n"] * 65, "64 are the most"), ([""], "1 to 40"), (["x" * 41], "1 to 40")):
        with pytest.raises(ConfigError, match=cure):
            check_sampling({**NEUTRAL, "dry_sequence_breakers": refused})


@pytest.mark.parametrize("name", PARAMETERS)
def test_neutral_values_are_in_their_bounds(name: str) -> None:
    bounds = PARAMETERS[name]
    assert bounds.least <= NEUTRAL[name] <= bounds.most
    assert bounds.beside_greedy is None or NEUTRAL[name] in bounds.beside_greedy


@pytest.mark.parametrize(
    ("params", "numbers"),
    [
        (SamplingParams(), (0.0, 0, 1.0, 0.0, 1.0)),
        (SamplingParams(0.7, 40, 0.9, 0.1, 1.2), (0.7, 40, 0.9, 0.1, 1.2)),
        (SamplingParams(COLDEST / 2, 40, 0.9, 0.1, 1.2), (0.0, 0, 1.0, 0.0, 1.2)),
        (SamplingParams(0.7, 40, 0.0), (0.0, 0, 1.0, 0.0, 1.0)),
        (SamplingParams(0.7, 40, min_p=1.0), (0.0, 0, 1.0, 0.0, 1.0)),
        (SamplingParams(1e300, -1), (HOTTEST, 0, 1.0, 0.0, 1.0)),
        (SamplingParams(0.7, 1 << 40), (0.7, MOST_KEPT, 1.0, 0.0, 1.0)),
    ],
    ids=str,
)
def test_kernels_take_limits_in_their_own_terms(params: SamplingParams, numbers: tuple[float, ...]) -> None:
    assert params.for_kernels().numbers == numbers
