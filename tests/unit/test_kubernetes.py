"""The manifests of deploy/kubernetes, against the schemas of Kubernetes, KubeRay and Ray Serve."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.37"
RAY_SERVICE = ROOT / "tests" / "golden" / "kuberay" / "rayservice.json"
"""The schema of RayService in KubeRay's CRD (ray-operator/config/crd/bases at feeaf72, August 2026) without
descriptions and without what it takes over from Kubernetes; fields that it does not name are refused."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def templates(service: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]


def test_every_file_is_checked() -> None:
    assert sorted(file.name for file in FOLDER.iterdir()) == ["rayservice.yaml", "server.yaml"]


def test_one_server_is_what_kubernetes_accepts() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[test]'")
    found = documents("server.yaml")
    assert [one["kind"] for one in found] == ["PersistentVolumeClaim", "Deployment", "Service"]
    for one in found:
        validator.validate(one, VERSION, strict=True)
    misspelt = json.loads(json.dumps(found[1]).replace("readinessProbe", "readynessProbe"))
    with pytest.raises(validator.ValidationError):
        validator.validate(misspelt, VERSION, strict=True)


def test_one_server_ends_within_the_grace_of_its_pod() -> None:
    pod = documents("server.yaml")[1]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (grace,) = [int(one.partition("=")[2]) for one in container["args"] if one.startswith("task.grace=")]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before + grace + 5
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["httpGet"]["path"] == "/ping"


def test_replicas_are_what_kuberay_and_kubernetes_accept() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[test]'")
    (service,) = documents("rayservice.yaml")
    jsonschema.validate(service, json.loads(RAY_SERVICE.read_text()))
    for template in templates(service):
        labels = {"app": "any"}
        pod = {"metadata": {"labels": labels}, "spec": template["spec"]}
        deployment = {"selector": {"matchLabels": labels}, "template": pod}
        whole = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "any"}, "spec": deployment}
        validator.validate(whole, VERSION, strict=True)
    service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(service, json.loads(RAY_SERVICE.read_text()))


def test_the_application_of_kuberay_is_one_that_ray_serve_builds() -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'graphcore[ray]'")
    from ray.serve.schema import ServeDeploySchema

    from graphcore.config.compose import compose_settings, merge_schema
    from graphcore.serving import ray_app
    from graphcore.serving.serve_settings import ServeSettings, checked_settings

    (service,) = documents("rayservice.yaml")
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"])).applications
    assert application.import_path == f"{ray_app.__name__}:{ray_app.build.__name__}"
    assert isinstance(application.args, dict)
    settings = compose_settings(["task=serve", *(f"{key}={value}" for key, value in application.args.items())])
    task = merge_schema(ServeSettings, settings.task, "task=serve")
    task.api_key = "key"
    settings, task = checked_settings(settings, task)
    assert (settings.model.name, task.replicas, task.max_replicas) == ("smollm2", 2, 4)
    sizes = [template["spec"]["containers"][0]["resources"]["limits"]["cpu"] for template in templates(service)]
    assert sizes[1] == str(settings.threads), "a pod has the processors that a replica asks for"
