"""The keys of conf/task/serve.yaml, and what they must be."""

import os
from dataclasses import dataclass, replace

from omegaconf import MISSING

from graphcore.config.settings import Settings
from graphcore.config.validate import PROMPT_KEYS, at_least, refuse_unused_settings
from graphcore.errors import ConfigError

KEY_VARIABLE = "GRAPHCORE_API_KEY"
LOGS = ("text", "json")
ALIASES = (None, "vllm", "llamacpp")
LEAST = {
    "replicas": 1,
    "max_replicas": 1,
    "port": 0,
    "grace": 0,
    "receive_timeout": 0.1,
    "send_timeout": 0.1,
    "ping": 0.1,
    "stream_interval": 0,
    "max_body_bytes": 1024,
    "max_answers": 1,
    "max_tools": 0,
    "max_grammar_chars": 0,
    "max_connections": 1,
    "request_timeout": 0.1,
    "pass_timeout": 0.1,
    "max_prompt_tokens": 1,
    "max_new_tokens": 1,
}
"""The least value of each number; None is taken where conf/task/serve.yaml has null."""


@dataclass
class ServeSettings:
    """The keys of conf/task/serve.yaml, which describes them."""

    name: str = MISSING
    max_sequences: int = MISSING
    replicas: int = MISSING
    max_replicas: int | None = MISSING
    host: str = MISSING
    port: int = MISSING
    api_key: str | None = MISSING
    open: bool = MISSING
    allowed_hosts: list[str] = MISSING
    cors_origins: list[str] = MISSING
    model_name: str | None = MISSING
    strict: bool = MISSING
    exact: bool = MISSING
    grace: float = MISSING
    request_timeout: float | None = MISSING
    pass_timeout: float | None = MISSING
    receive_timeout: float = MISSING
    send_timeout: float = MISSING
    ping: float = MISSING
    stream_interval: float = MISSING
    max_body_bytes: int = MISSING
    max_prompt_tokens: int | None = MISSING
    max_new_tokens: int | None = MISSING
    max_answers: int = MISSING
    max_tools: int = MISSING
    max_grammar_chars: int = MISSING
    max_connections: int = MISSING
    log: str = MISSING
    metric_aliases: str | None = MISSING


def checked_settings(settings: Settings, task: ServeSettings) -> tuple[Settings, ServeSettings]:
    """Return the settings of the engine and of the task, checked, with the key that the environment may have.

    Raises:
        ConfigError: a value is out of range, contradicts another, or has no effect.
    """
    key = task.api_key or os.environ.get(KEY_VARIABLE) or None
    return _with_sequences(settings, task), check_serving(replace(task, api_key=key))


def _with_sequences(settings: Settings, task: ServeSettings) -> Settings:
    """Return the settings with room for the task's sequences.

    Raises:
        ConfigError: another setting contradicts it or has no effect.
    """
    at_least(1, "task.", task, ("max_sequences",))
    refuse_unused_settings(settings, "serve", PROMPT_KEYS)
    if settings.batching.max_sequences not in (1, task.max_sequences):
        raise ConfigError(
            f"batch_size={settings.batching.max_sequences} and task.max_sequences={task.max_sequences} contradict each "
            "other; set task.max_sequences alone"
        )
    return replace(settings, batching=replace(settings.batching, max_sequences=task.max_sequences))


def check_serving(settings: ServeSettings) -> ServeSettings:
    """Return the settings.

    Raises:
        ConfigError: a value is out of range, or everybody could reach the server without a key.
    """
    from graphcore.serving.guard import is_loopback

    for key, least in LEAST.items():
        value = getattr(settings, key)
        if value is not None and value < least:
            raise ConfigError(f"task.{key}={value} must be at least {least}")
    if settings.port > 65535:
        raise ConfigError(f"task.port={settings.port} must be at most 65535")
    for key, known in (("log", LOGS), ("metric_aliases", ALIASES)):
        if getattr(settings, key) not in known:
            raise ConfigError(f"task.{key}={getattr(settings, key)} must be one of {', '.join(map(str, known))}")
    if settings.max_replicas is not None and settings.max_replicas < settings.replicas:
        raise ConfigError(
            f"task.max_replicas={settings.max_replicas} is less than task.replicas={settings.replicas}, of which there "
            "are always as many"
        )
    if not is_loopback(settings.host) and settings.api_key is None and not settings.open:
        raise ConfigError(
            f"task.host={settings.host} lets other machines in; set task.api_key, or task.open=true to let everybody "
            "use the model"
        )
    return settings
