"""Ranges and combinations of the streaming settings. What needs to know the device is checked by the plan."""

from graphcore.config.byte_sizes import parse_nbytes
from graphcore.config.settings import Settings, StreamingSettings
from graphcore.errors import ConfigError

MOST_PREFETCH = 8  # groups; each needs a slot of its own, and a link is full long before
NEUTRAL = {  # of the keys that say how weights move; a budget holds for weights that do not move, too
    "layer_group_size": 1,
    "host_memory_budget": "auto",
    "pinned_memory": True,
    "prefetch": "auto",
    "mode": "async",
    "source": "auto",
    "expert_cache": "auto",
}


def check_streaming(settings: Settings) -> None:
    """Return if every streaming key is in range, has an effect, and contradicts no other.

    Raises:
        ConfigError: the first that does not.
    """
    streaming = settings.streaming
    _check_choices(streaming)
    if streaming.layer_group_size < 1:
        raise ConfigError(f"streaming.layer_group_size={streaming.layer_group_size} must be at least 1")
    for key in ("memory_budget", "host_memory_budget", "expert_cache"):
        nbytes = parse_nbytes(f"streaming.{key}", vars(streaming)[key])
        if nbytes == 0 and key != "expert_cache":
            raise ConfigError(f"streaming.{key}={vars(streaming)[key]} must be auto or more than 0 bytes")
    _check_prefetch(streaming)
    if streaming.policy == "off":
        _check_nothing_is_asked_of_off(settings)


def _check_choices(streaming: StreamingSettings) -> None:
    choices = (
        ("policy", streaming.policy, ("auto", "on", "off")),
        ("mode", streaming.mode, ("async", "sync")),
        ("source", streaming.source, ("auto", "host", "disk")),
    )
    for key, value, allowed in choices:
        if value not in allowed:
            raise ConfigError(f"streaming.{key}={value} is not one of {', '.join(allowed)}", is_unknown=True)


def _check_prefetch(streaming: StreamingSettings) -> None:
    prefetch = streaming.prefetch
    if prefetch == "auto":
        return
    if type(prefetch) is not int or not 0 <= prefetch <= MOST_PREFETCH:
        raise ConfigError(
            f"streaming.prefetch={prefetch} must be auto or a whole number from 0 to {MOST_PREFETCH}",
            is_unknown=type(prefetch) is not int,
        )
    if streaming.mode == "sync" and prefetch > 0:
        raise ConfigError(
            f"streaming.prefetch={prefetch} contradicts streaming.mode=sync, which reads nothing ahead; use "
            "streaming.mode=async or leave prefetch out"
        )


def _check_nothing_is_asked_of_off(settings: Settings) -> None:
    asked = [f"streaming.{key}" for key, value in NEUTRAL.items() if vars(settings.streaming)[key] != value]
    asked += ["trace"] if settings.trace else []
    if asked:
        raise ConfigError(f"{asked[0]} has no effect with streaming=off; use streaming=on or auto, or leave it out")
