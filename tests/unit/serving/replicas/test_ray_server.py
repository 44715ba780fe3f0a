"""What Ray is asked for, and what this machine is said to lack; test_replicas.py runs it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.serving import serve_settings

from graphcore.config.compose import compose_settings
from graphcore.errors import ConfigError

ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'graphcore[ray]'")

from graphcore.serving import ray_app  # noqa: E402 - Ray must be there
from graphcore.serving.ray_app import replicated  # noqa: E402 - Ray must be there
from graphcore.serving.replicas.ray_server import refuse_too_many, words_of  # noqa: E402
from graphcore.serving.replicas.replica_resources import planned_resources, replica_settings  # noqa: E402

RESOURCES = {"num_cpus": 2, "memory": 3 << 30, "num_gpus": 0}


def deployments(**keys: Any) -> dict[str, Any]:
    """Return the deployments that Ray Serve makes of an application, by name."""
    from ray.serve._private.build_app import build_app

    built = build_app(replicated(compose_settings([]), serve_settings(**keys), RESOURCES), name="any")
    return {one.name: one for one in built.deployments}


def test_a_replica_asks_for_what_its_plan_says() -> None:
    found = deployments(replicas=3, grace=7)
    assert sorted(found) == ["Ingress", "Replica"]
    assert found["Replica"].num_replicas == 3
    assert {"num_cpus": 2, "memory": 3 << 30, "num_gpus": 0}.items() <= found["Replica"].ray_actor_options.items()
    assert found["Replica"]._deployment_config.graceful_shutdown_timeout_s > 7


def test_the_bounds_of_autoscaling_are_those_of_the_task() -> None:
    replica = deployments(replicas=2, max_replicas=5, max_sequences=6)["Replica"]
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 6)
    assert deployments(replicas=2, max_replicas=2)["Replica"]._deployment_config.autoscaling_config is None


def test_ray_is_asked_again_after_it_did_not_know_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, int]] = [{}, {"RUNNING": 2}]

    def states() -> dict[str, int]:
        found = answers.pop(0)
        return found or {"RUNNING": found["RUNNING"]}

    monkeypatch.setattr(ray_app, "_replica_states", states)
    monkeypatch.setattr(ray_app, "STATUS_SECONDS", 0.0)

    async def asked_twice() -> list[dict[str, int]]:
        ingress = ray_app.Ingress(SimpleNamespace(options=lambda **_: None), serve_settings())  # type: ignore[arg-type]
        first = await ingress._replica_states()
        await asyncio.sleep(0.01)
        return [first, await ingress._replica_states()]

    assert asyncio.run(asked_twice()) == [{}, {"RUNNING": 2}]


def test_planned_bytes_and_threads_are_those_of_the_plan() -> None:
    from graphcore import Engine

    options = [
        "model=llama3",
        "model.checkpoint=random:",
        "model.num_hidden_layers=1",
        "context_length=64",
        "threads=1",
    ]
    small = ["threads=1", "model.random_config.hidden_size=64", "model.random_config.vocab_size=512"]
    settings = compose_settings([*options, *small, "device=cpu", "graph=eager"])
    found = planned_resources(settings)
    engine = Engine.from_settings(settings)
    assert found == {"num_cpus": 1, "memory": engine.plan.peak_nbytes}


@pytest.mark.parametrize(
    ("free", "message"),
    [
        ({"CPU": 3, "memory": 100 << 30}, "need 4 of CPU, and this machine has 3"),
        ({"CPU": 8, "memory": 5 << 30}, "need 6.00 GiB of memory, and this machine has 5.00 GiB"),
    ],
)
def test_too_many_replicas_are_refused(free: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    with pytest.raises(ConfigError, match=message):
        refuse_too_many(RESOURCES, 2)
    refuse_too_many({**RESOURCES, "num_cpus": 1, "memory": 1 << 30}, 2)


def test_replicas_share_this_machine_s_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphcore.serving.replicas.replica_resources.usable_processors", lambda: 8)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8})
    settings = compose_settings([])
    mine = replica_settings(settings, 4)
    assert (mine.threads, mine.device) == (2, "cpu")
    assert replica_settings(compose_settings(["threads=3"]), 4).threads == 3
    assert replica_settings(settings, None).threads is None, "a machine of its own, whose processors are not known here"


def test_replicas_with_gpus_share_their_machines_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 64.0}},
        {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}},
        {"Alive": False, "Resources": {"CPU": 1.0, "GPU": 1.0}},
    ]
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 96, "GPU": 6})
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    found = replica_settings(compose_settings([]), None)
    assert (found.device, found.threads) == ("cuda", 4)


def test_words_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [1, 2])
    said = words_of({**RESOURCES, "num_gpus": 1}, serve_settings(replicas=2, max_replicas=4))
    assert said == "2 to 4 replicas, each with threads=2 and 3.00 GiB and a GPU; machines: 2"
