"""task=serve: answer clients of OpenAI's and Anthropic's interfaces over HTTP; docs/serving.md describes it.

The server listens before torch is imported, which takes seconds: the thread that loads the model imports it.
"""

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.serving.listener import bound_socket
from graphcore.serving.running_servers import RunningServer, remove_this_server, this_server
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
    entry: Record = {"since": time.time()}  # of the list of servers
    is_over = threading.Event()

    def progress(stage: str, group: int | None, done: int, total: int) -> None:
        if stage in STAGES_OF_REQUESTS:
            return
        if is_over.is_set():
            raise ConfigError(ENDED)
        context.console.progress(stage, group, done, total)

    def list_server(**known: Any) -> None:
        entry.update(known)
        if "url" in entry and not is_over.is_set():  # the model may be loaded before the address is known
            write_entry(context, this_server(name, **entry))

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
        list_server(is_loading=False, context_length=engine.choices.context_length)
        return engine

    def say_address(port: int) -> None:
        for line in address_lines(settings, name, port):
            context.console.note(line)
        list_server(url=address(settings, port))

    try:
        served = serve_model(name, settings, load, say_address, context.settings.model.served_names)
    finally:
        is_over.set()
        remove_this_server()
    try:
        record = {"model_name": name, "num_requests": served.num_answered}
        if served.loaded_engine is None:
            return record
        from graphcore.tasks.report.run_record import ran_record

        return {**record, **ran_record(served.loaded_engine), **loaded}
    finally:
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

    since = time.time()

    def say(running: ServeSettings, replicas: str) -> None:
        for line in (*address_lines(running, name, running.port), f"[{replicas}]"):
            context.console.note(line)
        write_entry(context, this_server(name, address(running, running.port), since, is_loading=False))

    try:
        ran = serve_replicas(context.settings, task, say)
    finally:
        remove_this_server()
    return {"model_name": name, "num_requests": ran.num_answered, "replica_resources": dict(ran.resources)}


def write_entry(context: Context, server: RunningServer) -> None:
    """Write the file with which `graphcore ps` lists the server, or say why it will not."""
    try:
        server.write()
    except OSError as error:
        context.console.note(f"[graphcore ps does not list this server: {error.filename}: {error.strerror}]")


def address(settings: ServeSettings, port: int) -> str:
    """Return the address that a server with these settings listens on."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{port}"


def address_lines(settings: ServeSettings, name: str, port: int) -> list[str]:
    """Return what the user is told when the server listens."""
    url = address(settings, port)
    lines = [
        f"[serving {name} at {url}/v1, and a page for browsers at {url}/; Ctrl-C ends it]",
        "[it is ready when /health says so; the page waits for that by itself]",
    ]
    if settings.open and settings.api_key is None:
        lines.append("[task.open=true: whoever reaches this address may use the model]")
    return lines


TASK = Task("serve", ServeSettings, run, check, needs_torch=False)
