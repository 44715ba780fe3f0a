"""task=serve: answer clients of OpenAI's and Anthropic's interfaces over HTTP; docs/serving.md describes it."""

import logging
import os
import sys
import threading
import time
from dataclasses import replace

from graphcore.config.settings import Settings
from graphcore.config.validate import PROMPT_KEYS, at_least, refuse_unused_settings
from graphcore.engine.engine import Engine
from graphcore.errors import ConfigError
from graphcore.serving.serve_settings import ServeSettings
from graphcore.tasks.report.run_record import compile_record, ran_record
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import describe, load_engine

KEY_VARIABLE = "GRAPHCORE_API_KEY"
LOGS = ("text", "json")
ALIASES = (None, "vllm", "llamacpp")
STAGES_OF_REQUESTS = ("prefill", "generate")  # whose progress is no matter of the server's log
LEAST = {
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
    "max_prompt_tokens": 1,
    "max_new_tokens": 1,
}
"""The least value of each number; None is taken where conf/task/serve.yaml has null."""


def run(context: Context, task: ServeSettings) -> Record:
    """Serve until a signal ends it."""
    from graphcore.serving.http_server import serve_model

    context = replace(context, settings=serve_settings(context.settings, task))
    settings = check_serving(replace(task, api_key=task.api_key or os.environ.get(KEY_VARIABLE) or None))
    log_requests(settings.log)
    name = settings.model_name or context.settings.model.display_name

    loaded: Record = {}
    is_over = threading.Event()

    def progress(stage: str, group: int | None, done: int, total: int) -> None:
        if stage in STAGES_OF_REQUESTS:
            return
        if is_over.is_set():
            raise ConfigError("the server has ended while the model was loaded")
        context.console.progress(stage, group, done, total)

    def load() -> Engine:
        began = time.perf_counter()
        engine = load_engine(context, on_progress=progress)
        loaded["load_seconds"] = time.perf_counter() - began
        loaded["compile"] = compile_record(engine.warm_up(engine.runner.sizes.batch_size))
        context.console.note(describe(engine, loaded["load_seconds"]))
        return engine

    def say_address(port: int) -> None:
        for line in address_lines(settings, name, port):
            context.console.note(line)

    served = serve_model(name, settings, context.settings.sampling_params, load, say_address)
    try:
        ran = {} if served.loaded_engine is None else ran_record(served.loaded_engine)
        return {"model_name": name, "num_requests": served.num_answered, **ran, **loaded}
    finally:
        is_over.set()
        served.close()


def serve_settings(settings: Settings, task: ServeSettings) -> Settings:
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
    if not is_loopback(settings.host) and settings.api_key is None and not settings.open:
        raise ConfigError(
            f"task.host={settings.host} lets other machines in; set task.api_key, or task.open=true to let everybody "
            "use the model"
        )
    return settings


def address_lines(settings: ServeSettings, name: str, port: int) -> list[str]:
    """Return what the user is told when the server listens."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{port}"
    lines = [
        f"[serving {name} at {address}/v1, and a page for browsers at {address}/; Ctrl-C ends it]",
        "[it is ready when /health says so; the page waits for that by itself]",
    ]
    if settings.open and settings.api_key is None:
        lines.append("[task.open=true: whoever reaches this address may use the model]")
    return lines


def log_requests(form: str) -> None:
    """Write the requests' lines to standard error."""
    from graphcore.serving.http_exchange import JsonLines

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(message)s"))
    for name, level in (("graphcore.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(level)
        log.propagate = False


TASK = Task("serve", ServeSettings, run)
