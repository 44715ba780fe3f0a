"""Resources that a replica requests from Ray (CPUs, memory, GPUs), from its memory plan."""

from collections.abc import Mapping
from dataclasses import replace

import ray
from ray.exceptions import RayTaskError

from graphcore.config.settings import Settings
from graphcore.processors import usable_processors
from graphcore.progress import ignore_progress


def replica_settings(settings: Settings, shares: int | None) -> Settings:
    """Return the settings of a replica: a GPU if the cluster has some, and its share of a machine's processors.

    Args:
        shares: replicas on this machine, which is the cluster; None for another cluster. There a replica without a GPU
            has a machine of its own, unless `threads` is set.
    """
    if settings.device == "auto":
        settings = replace(settings, device="cuda" if ray.cluster_resources().get("GPU") else "cpu")
    if settings.threads is not None:
        return settings
    if shares is not None:
        return replace(settings, threads=max(1, usable_processors() // shares))
    if settings.device == "cpu":
        return settings
    with_gpus = [one["Resources"] for one in ray.nodes() if one["Alive"] and one["Resources"].get("GPU")]
    threads = [int(one.get("CPU", 1) // one["GPU"]) for one in with_gpus]
    return replace(settings, threads=max(1, min(threads, default=1)))


def replica_resources(settings: Settings) -> Mapping[str, float]:
    """Return the Ray resources of a replica: num_cpus, memory in bytes, num_gpus.

    The plan is made by a task of the cluster, with a GPU if replicas have one: this process may run elsewhere.

    Raises:
        GraphcoreError: a setting, the checkpoint or the machine stands in the way.
    """
    num_gpus = 1 if settings.device.startswith("cuda") else 0
    task = ray.remote(num_cpus=0, num_gpus=num_gpus, max_retries=0)(planned_resources)
    try:
        found: Mapping[str, float] = ray.get(task.remote(settings))
    except RayTaskError as error:
        raise error.cause from None  # as if the plan had been made here
    return {**found, "num_gpus": num_gpus}


def planned_resources(settings: Settings) -> Mapping[str, float]:
    """Return num_cpus (threads) and memory (planned bytes of RAM) of a replica, planned on this machine."""
    from graphcore.device import use_threads
    from graphcore.engine.loading.load_model import loaders_of
    from graphcore.engine.loading.plan_run import ram_of

    threads = settings.threads or usable_processors()
    settings = replace(settings, threads=threads)
    use_threads(threads)
    (loader,) = loaders_of(settings)
    parts = loader.prepare(settings, loader.open(settings, ignore_progress), ignore_progress)
    parts, plan, tier = loader.plan(settings, parts, ignore_progress)
    ram = ram_of(parts, plan, tier) + (plan.peak_nbytes if plan.device == "cpu" else 0)
    return {"num_cpus": threads, "memory": ram}
