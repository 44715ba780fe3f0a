"""`graphcore serve` with replicas: starts Ray on this machine, or joins a cluster, and serves until a signal."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.processors import usable_processors
from graphcore.serving.listener import bound_socket
from graphcore.serving.ray_app import SPARE_SECONDS, replicated
from graphcore.serving.replicas.replica_resources import replica_resources, replica_settings
from graphcore.serving.serve_settings import ServeSettings

APP = "graphcore"  # name of the application on Ray Serve
CONTROLLER = "SERVE_CONTROLLER_ACTOR"  # Ray Serve's actor, which there is while it runs
STORE_NBYTES = 100 << 20  # of Ray's object store: messages are small, and are not kept there
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # else lines of requests would be left out
    "RAY_COLOR_PREFIX": "0",
}
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


Handlers = Mapping[signal.Signals, Any]


@dataclass(frozen=True)
class ReplicasRun:
    """The outcome of a server run.

    Attributes:
        num_answered: requests that were answered.
        resources: what Ray was asked for, for each replica.
    """

    num_answered: int
    resources: Mapping[str, float]


def serve_replicas(
    settings: Settings, task: ServeSettings, on_start: Callable[[ServeSettings, str], None]
) -> ReplicasRun:
    """Serve a model with several replicas until SIGINT, SIGTERM or SIGHUP.

    Args:
        settings, task: checked settings.
        on_start: function that is called once requests are taken, with the settings of the port that was chosen and
            words about the replicas.

    Raises:
        ConfigError: this machine has too little for so many replicas, or one of them could not be loaded.
    """
    before: Handlers = {number: signal.getsignal(number) for number in ENDING}
    is_own = start_ray()
    take_signals(before)  # Ray has taken some of them
    try:
        refuse_running_serve()
        settings = replica_settings(settings, (task.max_replicas or task.replicas) if is_own else None)
        resources = replica_resources(settings)
        if is_own:
            refuse_too_many(resources, task.replicas)
        task = replace(task, port=free_port(task))
        handle = deployed(settings, task, resources)
        on_start(task, words_of(resources, task))
        wait_for_signal(before)
        num_answered = drained(handle, task)
        serve.delete(APP)
        return ReplicasRun(num_answered, resources)
    finally:
        if is_own:
            ray.shutdown()
        else:
            serve.shutdown()  # it was not running on the cluster before


def deployed(settings: Settings, task: ServeSettings, resources: Mapping[str, float]) -> DeploymentHandle[Any]:
    """Start Ray Serve, deploy the application, wait until it is running, and return a handle of its ingress.

    Raises:
        ConfigError: a replica cannot be loaded.
    """
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(http_options={"host": task.host, "port": task.port}, logging_config=quiet)
    try:
        return serve.run(replicated(settings, task, resources), name=APP, route_prefix="/")
    except RuntimeError as error:
        status = serve.status().applications.get(APP)
        found = [one.message for one in status.deployments.values() if one.message] if status else []
        reason = " ".join((found or [str(error)])[0].split())
        raise ConfigError(f"the replicas cannot be loaded: {reason}") from error


def drained(handle: DeploymentHandle[Any], task: ServeSettings) -> int:
    """Drain the ingress, and return the number of requests served; 0 if the ingress does not respond."""
    try:
        found: int = handle.drain.remote().result(timeout_s=task.grace + 2 * SPARE_SECONDS)
    except (TimeoutError, RayError, RayServeException) as error:
        logging.getLogger("ray.serve").warning("the answers that ran could not be waited for: %s", error)
        return 0
    return found


def refuse_running_serve() -> None:
    """Check that no Ray Serve instance runs on the cluster: its HTTP host and port could not be changed.

    Raises:
        ConfigError: it runs.
    """
    try:
        ray.get_actor(CONTROLLER, namespace="serve")
    except ValueError:
        return
    raise ConfigError("Ray Serve runs on this cluster already; use serve deploy with a file (docs/scaling.md)")


def take_signals(handlers: Handlers) -> None:
    """Set the handlers of signals."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def wait_for_signal(before: Handlers) -> None:
    """Wait until a signal comes; further ones are handled as before."""
    has_come = threading.Event()
    take_signals({number: lambda *_: has_come.set() for number in before})
    has_come.wait()
    take_signals(before)


def free_port(task: ServeSettings) -> int:
    """Return the port to listen on, chosen now if the task leaves it open.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    with bound_socket(task.host, task.port) as found:
        port: int = found.getsockname()[1]
    return port


def start_ray() -> bool:
    """Connect to the cluster of the variable RAY_ADDRESS, or start Ray on this machine.

    Returns:
        True if Ray was started, for this command alone.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address, level = os.environ.get("RAY_ADDRESS"), logging.WARNING
    if not address:
        ray.init(
            "local",
            num_cpus=usable_processors(),
            object_store_memory=STORE_NBYTES,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            logging_level=level,
        )
        return True
    try:
        ray.init(address, logging_level=level)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"there is no Ray cluster at RAY_ADDRESS={address}: {error}") from error
    return False


def refuse_too_many(resources: Mapping[str, float], replicas: int) -> None:
    """Check that this machine has what replicas need.

    Raises:
        ConfigError: it has not.
    """
    free = ray.available_resources()
    for name, key, advice in (
        ("num_cpus", "CPU", "threads"),
        ("memory", "memory", "streaming.memory_budget with streaming=auto"),
        ("num_gpus", "GPU", "device=cpu"),
    ):
        need, has = resources[name] * replicas, free.get(key, 0)
        if need > has:
            shown = (in_words(int(need)), in_words(int(has))) if key == "memory" else (f"{need:g}", f"{has:g}")
            raise ConfigError(
                f"task.replicas={replicas} need {shown[0]} of {key}, and this machine has {shown[1]}; set fewer, or "
                f"{advice}"
            )


def words_of(resources: Mapping[str, float], task: ServeSettings) -> str:
    """Return a description of the replicas and the resources of each."""
    most = task.max_replicas or task.replicas
    number = f"{task.replicas} replicas" if most == task.replicas else f"{task.replicas} to {most} replicas"
    gpu = " and a GPU" if resources["num_gpus"] else ""
    each = f"threads={resources['num_cpus']:g} and {in_words(int(resources['memory']))}{gpu}"
    return f"{number}, each with {each}; machines: {len(ray.nodes())}"
