"""The keys of conf/task/serve.yaml."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class ServeSettings:
    """The keys of conf/task/serve.yaml, which describes them."""

    name: str = MISSING
    max_sequences: int = MISSING
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
