"""task=serve: answer clients of OpenAI's and Anthropic's interfaces over HTTP; docs/serving.md describes it.

The server listens before torch is imported, which takes seconds: the thread that loads the model imports it.
"""

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.serving.listener import bound_socket
from graphcore.serving.serve_settings import ServeSettings, checked_settings
from graphcore.tasks.task import Context, Record, Task

if TYPE_CHECKING:
    from graphcore.engine.engine import Engine

ENDED = "the server has ended while the model was loaded"
STAGES_OF_REQUESTS = ("prefill", "generate")  # whose progress is no matter of the server's log


def check(settings: Settings, task: ServeSettings) -> None:
    """Check the settings, and that the address can be listened on."""
    _, checked = checked_settings(settings, task)
    bound_socket(checked.host, checked.port).close()


def run(context: Context, task: ServeSettings) -> Record:
    """Serve until a signal ends it."""
    engine_settings, settings = checked_settings(context.settings, task)
    context = replace(context, settings=engine_settings)
    is_one = settings.replicas == 1 and settings.max_replicas is None
    return serve_here(context, settings) if is_one else serve_on_ray(context, settings)


def serve_here(context: Context, settings: ServeSettings) -> Record:
    """Serve from this process until a signal ends it."""
    from graphcore.serving.http_exchange import log_requests
    from graphcore.serving.http_server import serve_model

    log_requests(settings.log)
    name = settings.model_name or context.settings.model.display_name
    loaded: Record = {}
    is_over = threading.Event()

    def progress(stage: str, group: int | None, done: int, total: int) -> None:
        if stage in STAGES_OF_REQUESTS:
            return
        if is_over.is_set():
            raise ConfigError(ENDED)
        context.console.progress(stage, group, done, total)

    def load() -> "Engine":
        from graphcore.tasks.report.run_record import compile_record
        from graphcore.tasks.task_engine import describe, load_engine

        if is_over.is_set():
            raise ConfigError(ENDED)
        began = time.perf_counter()
        engine = load_engine(context, on_progress=progress)
        loaded["load_seconds"] = time.perf_counter() - began
        loaded["compile"] = compile_record(engine.warm_up(engine.runner.sizes.batch_size))
        context.console.note(describe(engine, loaded["load_seconds"]))
        context.console.note(f"[sampling of requests that say nothing of it: {engine.loaded.sampling.words}]")
        return engine

    def say_address(port: int) -> None:
        for line in address_lines(settings, name, port):
            context.console.note(line)

    served = serve_model(name, settings, load, say_address, context.settings.model.served_names)
    try:
        record = {"model_name": name, "num_requests": served.num_answered}
        if served.loaded_engine is None:
            return record
        from graphcore.tasks.report.run_record import ran_record

        return {**record, **ran_record(served.loaded_engine), **loaded}
    finally:
        is_over.set()
        served.close()


def serve_on_ray(context: Context, task: ServeSettings) -> Record:
    """Serve with several replicas on Ray Serve until a signal ends it.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        from graphcore.serving.replicas.ray_server import serve_replicas
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError("task.replicas needs Ray; pip install 'graphcore[ray]'") from error
    name = task.model_name or context.settings.model.display_name

    def say(running: ServeSettings, replicas: str) -> None:
        for line in (*address_lines(running, name, running.port), f"[{replicas}]"):
            context.console.note(line)

    ran = serve_replicas(context.settings, task, say)
    return {"model_name": name, "num_requests": ran.num_answered, "replica_resources": dict(ran.resources)}


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


TASK = Task("serve", ServeSettings, run, check, needs_torch=False)
