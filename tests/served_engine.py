"""A server in a thread of the test's process, on a free port."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from omegaconf import OmegaConf

from graphcore import Engine
from graphcore.config.conf_folder import conf_dir
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.sampling_defaults import SamplingDefaults
from graphcore.sampling_params import NEUTRAL, SamplingParams
from graphcore.serving.http_server import DrainingServer, new_served
from graphcore.serving.listener import bound_socket
from graphcore.serving.serve_settings import ServeSettings
from graphcore.serving.served_model import ServedModel

SECONDS = 60.0


def serve_settings(**keys: Any) -> ServeSettings:
    """Return the settings of conf/task/serve.yaml with other values of some keys."""
    stated = OmegaConf.to_container(OmegaConf.load(conf_dir() / "task" / "serve.yaml"))
    assert isinstance(stated, dict)
    return ServeSettings(**{**{str(key): value for key, value in stated.items()}, "port": 0, **keys})


@dataclass
class Running:
    """A server that runs.

    Attributes:
        url: its address.
        served: its model.
        server: the server itself.
        thread: the thread that it runs in.
    """

    url: str
    served: ServedModel
    server: DrainingServer
    thread: threading.Thread

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=SECONDS)

    def wait_for(self, is_true: Callable[[], bool], seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.005)

    def num_requests(self) -> int:
        """Return the number of requests that the engine has."""
        engine = self.served.loaded_engine
        return 0 if engine is None else len(engine.status())

    def num_decoding(self) -> int:
        """Return the number of requests that have a row of the KV cache."""
        engine = self.served.loaded_engine
        return 0 if engine is None else sum(one.is_running for one in engine.status())


@contextmanager
def running_server(
    load: Callable[[], Engine],
    waits: bool = True,
    sampling: SamplingParams | None = None,
    has_own_sampling: bool = False,
    **keys: Any,
) -> Iterator[Running]:
    """Run a server; at the end its engine is closed, unless the test's own fixture keeps it.

    Args:
        load: function that loads the engine.
        waits: True to wait until it is ready.
        sampling: parameters of requests that set none; None is a temperature of 1.
        has_own_sampling: True to leave these to the model.
        keys: keys of the task.
    """
    settings = serve_settings(**keys)
    given = {name: value for name, value in vars(sampling or SamplingParams()).items() if value != NEUTRAL.get(name)}

    before: list[tuple[LoadedModel, SamplingDefaults]] = []

    def load_and_set() -> Engine:
        engine = load()
        if has_own_sampling:
            return engine
        before.append((engine.loaded, engine.loaded.sampling))
        engine.loaded.sampling = SamplingDefaults({"temperature": 1.0, **given}, "the test")
        return engine

    served, server = new_served("tiny", settings, load_and_set)
    listener = bound_socket(settings.host, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # else the kernel takes megabytes for slow readers
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", served, server, thread)
    try:
        running.wait_for(lambda: server.started and (not waits or served.state.value != "loading"))
        yield running
    finally:
        server.should_exit = server.force_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive(), "the server has not ended"
        for loaded, own in before:  # of an engine that other servers of a test file have, too
            loaded.sampling = own
