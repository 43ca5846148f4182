"""The example for KubeRay; `tests/deploy/kuberay.py CRD.yaml` checks it by KubeRay's schema."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pod_security import violations

from asyncrl.config.run_config import load_config

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = {
    one["kind"]: one
    for one in yaml.safe_load_all((ROOT / "docker/kuberay/rayjob.yaml").read_text(encoding="utf-8"))
}
CLUSTER = OBJECTS["RayJob"]["spec"]["rayClusterSpec"]
PODS = {
    "head": CLUSTER["headGroupSpec"]["template"],
    **{one["groupName"]: one["template"] for one in CLUSTER["workerGroupSpecs"]},
}


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kuberay", ROOT / "tests/deploy/kuberay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PODS)
def test_its_pods_are_valid_and_restricted(name: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **PODS[name]}
    kubernetes_validate.validate(pod, "1.37", strict=True)
    assert not violations(pod["spec"])


def test_other_objects_are_valid() -> None:
    for kind in ("ConfigMap", "PersistentVolumeClaim"):
        kubernetes_validate.validate(OBJECTS[kind], "1.37", strict=True)


def test_its_configuration_is_one_for_ray(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(OBJECTS["ConfigMap"]["data"]["run.yaml"], encoding="utf-8")
    config = load_config(tmp_path / "run.yaml", [])
    workers = CLUSTER["workerGroupSpecs"][0]
    assert (config.launcher.kind, config.launcher.generators) == ("ray", workers["replicas"])
    head = {mount["mountPath"] for mount in PODS["head"]["spec"]["containers"][0]["volumeMounts"]}
    assert str(config.run.directory) in head, "the trainer must see the run's folder"


def test_a_mistyped_field_is_found(checker: ModuleType) -> None:
    pods = {"type": "object", "properties": {"replicas": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"spec": pods, "metadata": {"type": "object"}}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": schema}}
    crd: dict[str, Any] = {"spec": {"versions": [version]}}
    job = {"metadata": {"name": "j"}, "spec": {"replicas": 2}, "apiVersion": "ray.io/v1"}
    schema["properties"]["apiVersion"] = {"type": "string"}
    assert checker.troubles(crd, job) == []
    wrong = copy.deepcopy(job) | {"spec": {"replicaz": 2}}
    (found,) = checker.troubles(crd, wrong)
    assert "replicaz" in found
