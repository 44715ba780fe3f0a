"""Changes of sampling parameters after the settings were read: by a line of a file, or in a chat."""

from collections.abc import Mapping
from dataclasses import asdict

from graphcore.engine.checked_arguments import sampling_params
from graphcore.engine.sampler import SamplingParams
from graphcore.errors import ConfigError

NARROWING = ("top_k", "top_p", "min_p")
SEEDS = 1 << 63


def changed_params(params: SamplingParams, values: Mapping[str, float | int]) -> SamplingParams:
    """Return the parameters with new values, checked like those of the command line.

    A new temperature of 0 also resets the cuts that have no new value: they have no effect on the likeliest token.

    Raises:
        ConfigError: a name is unknown, a value is out of range, or a value has no effect beside the others.
    """
    merged = {**asdict(params), **values}
    if values.get("temperature") == 0:
        neutral = asdict(SamplingParams())
        merged |= {key: neutral[key] for key in NARROWING if key not in values}
    if not 0 <= merged.get("seed", 0) < SEEDS:
        raise ConfigError(f"seed={merged['seed']} must be at least 0 and less than 2^63")
    return sampling_params(merged)
