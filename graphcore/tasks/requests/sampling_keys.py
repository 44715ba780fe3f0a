"""Changes of sampling parameters after the settings were read: by a line of a file, or in a chat."""

from collections.abc import Mapping
from dataclasses import asdict

from graphcore.config.validate import check_seed
from graphcore.engine.checked_arguments import sampling_params
from graphcore.engine.sampler import SamplingParams

NARROWING = ("top_k", "top_p", "min_p")


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
    params = sampling_params(merged)
    check_seed(params.seed)
    return params
