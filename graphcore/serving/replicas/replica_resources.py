"""What a replica needs of its machine, by its plan: Ray starts it only where that is free."""

from collections.abc import Mapping
from dataclasses import replace

import ray

from graphcore.config.settings import Settings
from graphcore.processors import usable_processors
from graphcore.progress import ignore_progress


def replica_resources(settings: Settings) -> Mapping[str, float]:
    """Return num_cpus, memory in bytes and num_gpus of a replica.

    The plan is made by a task of the cluster, with a GPU if replicas have one: this process may run elsewhere.

    Raises:
        GraphcoreError: a setting, the checkpoint or the machine stands in the way.
    """
    num_gpus = 1 if settings.device.startswith("cuda") else 0
    task = ray.remote(num_cpus=0, num_gpus=num_gpus, max_retries=0)(planned_resources)
    found: Mapping[str, float] = ray.get(task.remote(settings))
    return {**found, "num_gpus": num_gpus}


def planned_resources(settings: Settings) -> Mapping[str, float]:
    """Return the threads of a replica as num_cpus, and the bytes of RAM that its plan says as memory."""
    from graphcore.device import use_threads
    from graphcore.engine.loading.load_model import loader_of
    from graphcore.engine.loading.plan_run import plan_run, ram_of

    threads = settings.threads or usable_processors()
    settings = replace(settings, threads=threads)
    use_threads(threads)
    loader = loader_of(settings.model)
    parts = loader.prepare(settings, loader.open(settings, ignore_progress), ignore_progress)
    parts, plan, tier = plan_run(settings, parts)
    ram = ram_of(parts, plan, tier) + (plan.peak_nbytes if plan.device == "cpu" else 0)
    return {"num_cpus": threads, "memory": ram}
