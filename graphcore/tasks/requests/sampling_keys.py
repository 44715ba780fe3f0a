"""Changes of sampling parameters after the settings were read: by a line of a file, or in a chat."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from graphcore.config.validate import check_seed
from graphcore.engine.arguments import sampling_params
from graphcore.sampling_params import SamplingParams


def changed_params(params: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters with new values, checked like those of the command line.

    A new temperature of 0 turns off top-k, top-p and min-p. New values of these are refused if
    the temperature stays 0.

    Raises:
        ConfigError: a name is unknown, a value is out of range, or there is a new top-k, top-p or
            min-p and no temperature above 0.
    """
    old = {name: value for name, value in asdict(params).items() if name != "temperature" or value > 0}
    params = sampling_params({**old, **values})
    check_seed(params.seed)
    return params
