"""The Helm chart, rendered by Helm and checked against Kubernetes's schemas. No cluster is needed;
tests/deploy/kubernetes.sh installs it on one."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError
from kubernetes_validate import utils
from pod_security import violations

from asyncrl.config.run_config import load_config
from asyncrl.launch.agents.secret import read_secret

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "docker/chart"
EXAMPLES = {"default": {}} | {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((CHART / "examples").glob("*.yaml"))
}
FOREIGN = {"ScrapeConfig", "PodMonitor", "PrometheusRule", "ScaledObject"}
"""Kinds of operators, whose schemas are not Kubernetes's."""
HPA = {"generators": {"autoscaling": {"kind": "hpa"}}}

Objects = list[dict[str, Any]]


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


def rendered(chart: Chart, values: dict[str, Any], **options: Any) -> Objects:
    chart.validate_schema(values)
    files = chart.render(values, name="demo", namespace="train", **options)
    texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def one_of(objects: Objects, kind: str, name: str = "") -> dict[str, Any]:
    (found,) = [
        one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(name)
    ]
    return found


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    """The spec of every pod, by the name of what makes it."""
    return {
        f"{one['kind']} {one['metadata']['name']}": (
            one["spec"] if one["kind"] == "Pod" else one["spec"]["template"]["spec"]
        )
        for one in objects
        if one["kind"] in {"Pod", "StatefulSet", "Deployment", "Job"}
    }


@pytest.fixture(scope="module")
def _schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.mark.usefixtures("_schemas_are_read_once")
@pytest.mark.parametrize(
    ("values", "version"),
    [
        *((values, "1.37") for values in EXAMPLES.values()),
        (HPA, "1.37"),
        (EXAMPLES["monitoring"], "1.25"),
    ],
    ids=[*EXAMPLES, "hpa", "monitoring-1.25"],
)
def test_kubernetes_accepts_every_object(
    chart: Chart, values: dict[str, Any], version: str
) -> None:
    objects = rendered(chart, values)
    assert len(objects) >= 10
    for one in objects:
        if one["kind"] not in FOREIGN:
            kubernetes_validate.validate(one, version, strict=True)
    for name, pod in pods(objects).items():
        assert not violations(pod), name


def test_a_mistyped_field_would_be_noticed() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "p"},
                "spec": {"containrs": []},
            },
            "1.37",
            strict=True,
        )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("securityContext", "runAsNonRoot"), False),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}),
        (("hostNetwork",), True),
        (("volumes",), [{"name": "disk", "hostPath": {"path": "/"}}]),
        (
            ("containers", 0, "securityContext", "capabilities"),
            {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
        ),
        (("containers", 0, "securityContext", "allowPrivilegeEscalation"), True),
        (("initContainers", 0, "securityContext"), {}),
    ],
)
def test_what_the_restricted_profile_forbids_is_noticed(
    chart: Chart, path: tuple[Any, ...], value: object
) -> None:
    pod: Any = pods(rendered(chart, {}))["Deployment demo-asyncrl-generator"]
    assert not violations(pod)
    place = functools.reduce(lambda inner, key: inner[key], path[:-1], pod)
    place[path[-1]] = value
    assert violations(pod)


@pytest.mark.parametrize(
    "values",
    [
        {"generatorz": {}},
        {"generators": {"replica": 2}},
        {"generators": {"replicas": "two"}},
        {"trainer": {"resources": {"limit": {}}}},
        {"pod": {"volumes": [{"name": "disk", "hostPath": {"path": "/"}}]}},
        {"monitoring": {"enabled": False, "scrapeConfig": True}},
        {"sharedMemory": "2 GB"},
        {"config": {"trainer": {"learning_rat": 1e-6}}},
        {"config": {"trainer": {"learning_rate": -1}}},
        {"config": {"launcher": {"kind": "local"}}},
        {"config": {"run": {"directory": "elsewhere"}}},
        {"config": {"trainer": {"ranks": 2}}},
    ],
    ids=str,
)
def test_mistakes_are_refused_before_anything_starts(chart: Chart, values: dict[str, Any]) -> None:
    with pytest.raises(HelmError) as refused:
        chart.validate_schema(values)
    (key, *_) = values
    assert key in str(refused.value)


def test_every_value_is_known_to_the_schema() -> None:
    """So that a value that is not in values.yaml cannot be set, and one that is can."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert set(values) == set(schema["properties"]) - {"global"}
    open_ones = [name for name, one in schema["$defs"].items() if one.get("additionalProperties")]
    assert {name for name in open_ones if not name.startswith("config.")} == {
        "open", "texts", "quantities"
    }  # fmt: skip


def test_the_schema_is_that_of_the_configuration() -> None:
    path = CHART / "schema/generate.py"
    spec = importlib.util.spec_from_file_location("chart_schema", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stored = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert stored == module.values_schema(), "run: python docker/chart/schema/generate.py"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_run_has_the_users_settings_and_those_of_the_chart(
    chart: Chart, tmp_path: Path, name: str
) -> None:
    values = EXAMPLES[name]
    text = one_of(rendered(chart, values), "ConfigMap", "demo-asyncrl")["data"]["run.yaml"]
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "run.yaml", [])
    assert config.launcher.kind == "agents"
    assert (config.run.name, str(config.run.directory)) == ("demo", "/work/runs")
    wanted = values.get("config", {}).get("trainer", {}).get("learning_rate")
    assert wanted is None or config.trainer.learning_rate == wanted  # Helm writes 1e-06


def test_probes_ask_what_the_containers_answer(chart: Chart) -> None:
    for name, pod in pods(rendered(chart, {})).items():
        for container in pod["containers"]:
            if name.startswith("Pod"):
                continue
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            words = [*container["command"], *container.get("args", [])]
            for kind, path in (
                ("livenessProbe", "/healthz"),
                ("startupProbe", "/healthz"),
                ("readinessProbe", "/readyz"),
            ):
                probe = container[kind]["httpGet"]
                assert probe["path"] == path
                assert f"--health-port={ports[probe['port']]}" in words
            assert "--health-host=0.0.0.0" in words
            # What hangs neither leaves nor lets preStop end.
            assert container["livenessProbe"]["terminationGracePeriodSeconds"] == 60


def test_the_oldest_kubernetes_gets_no_field_that_it_does_not_know(tmp_path: Path) -> None:
    """Of 1.20 there are no schemas, and offline Helm renders for the newest that it knows."""
    shutil.copytree(CHART, tmp_path / "chart")
    for path in (tmp_path / "chart/templates").iterdir():
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(".Capabilities.KubeVersion.Version", '"v1.20.2"'), "utf-8")
    with Chart.load(tmp_path / "chart") as chart:
        objects = rendered(chart, EXAMPLES["monitoring"])
    probes = [
        probe
        for pod in pods(objects).values()
        for container in pod["containers"]
        for name, probe in container.items()
        if name.endswith("Probe")
    ]
    assert len(probes) >= 9
    assert not [probe for probe in probes if "terminationGracePeriodSeconds" in probe]
    assert "endPort" not in json.dumps(one_of(objects, "NetworkPolicy"))


def test_pods_have_time_to_end(chart: Chart) -> None:
    """A generator's agent ends its work before Kubernetes kills it; the controller saves."""
    made = pods(rendered(chart, EXAMPLES["fleet"]))
    generator = made["Deployment demo-asyncrl-generator"]
    (grace,) = [
        int(word.partition("=")[2])
        for word in generator["containers"][0]["command"]
        if word.startswith("--grace=")
    ]
    assert 0 < grace <= generator["terminationGracePeriodSeconds"] - 10
    controller = made["StatefulSet demo-asyncrl-controller"]
    launcher = EXAMPLES["fleet"]["config"]["launcher"]
    assert controller["terminationGracePeriodSeconds"] >= launcher["checkpoint_seconds"] + 60
    trainer = next(one for one in controller["containers"] if one["name"] == "trainer")
    waits = int(trainer["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert waits < controller["terminationGracePeriodSeconds"]


def test_the_secret_is_new_for_each_release_and_a_hook_of_its_installation(
    chart: Chart, tmp_path: Path
) -> None:
    first, second = (one_of(rendered(chart, {}), "Secret") for _ in range(2))
    assert first["data"] != second["data"]
    assert first["metadata"]["annotations"]["helm.sh/hook"] == "pre-install"
    file = tmp_path / "agents.key"
    file.write_bytes(base64.b64decode(first["data"]["agents.key"]))
    file.chmod(0o600)
    read_secret(file, "test")
    assert not [
        one
        for one in rendered(chart, {"secret": {"existingSecret": "mine"}})
        if one["kind"] == "Secret"
    ]


def test_nothing_of_the_secret_is_in_a_command_line_or_environment(chart: Chart) -> None:
    objects = rendered(chart, EXAMPLES["monitoring"])
    secret = one_of(objects, "Secret")["data"]["agents.key"]
    others = [one for one in objects if one["kind"] != "Secret"]
    assert secret not in json.dumps(others)


def test_network_policy_lets_through_what_the_pods_use_and_no_more(chart: Chart) -> None:
    policy = one_of(rendered(chart, {}), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (ingress,) = policy["ingress"]
    assert {port["port"] for port in ingress["ports"]} == {5900, 5901, 5990, *range(5910, 5920)}
    assert ingress["from"] == [
        {"podSelector": {"matchLabels": policy["podSelector"]["matchLabels"]}}
    ]
    assert len(policy["egress"]) == 2
    made = pods(rendered(chart, {}))
    for name, pod in made.items():
        for container in pod["containers"]:
            for word in container["command"]:
                if word.startswith("--ports="):
                    first, last = map(int, word.partition("=")[2].split("-"))
                    assert {first, last} <= {port["port"] for port in ingress["ports"]}, name


def test_monitoring_takes_the_rules_and_the_dashboard_of_the_repository(chart: Chart) -> None:
    objects = rendered(chart, EXAMPLES["monitoring"])
    groups = one_of(objects, "PrometheusRule")["spec"]["groups"]
    of_the_repository = [
        group
        for path in sorted((ROOT / "monitoring/rules").glob("*.yaml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]
    assert groups == of_the_repository
    dashboard = json.loads(one_of(objects, "ConfigMap", "-dashboard")["data"]["asyncrl.json"])
    stored = (ROOT / "monitoring/dashboards/asyncrl.json").read_text(encoding="utf-8")
    assert dashboard == json.loads(stored)
    assert not [one for one in rendered(chart, {}) if one["kind"] in FOREIGN]


def test_an_autoscaler_owns_the_number_of_generators(chart: Chart) -> None:
    assert "replicas" in one_of(rendered(chart, {}), "Deployment")["spec"]
    for values in (HPA, EXAMPLES["monitoring"]):
        assert "replicas" not in one_of(rendered(chart, values), "Deployment")["spec"]
    with pytest.raises(HelmError, match="address of Prometheus"):
        rendered(chart, {"generators": {"autoscaling": {"kind": "keda"}}})


def test_ranks_of_the_trainer_are_pods_that_share_the_volume_and_a_trusted_network(
    chart: Chart,
) -> None:
    objects = rendered(chart, EXAMPLES["ranks"])
    ranks = one_of(objects, "Deployment", "-trainer")
    assert ranks["spec"]["replicas"] == 15, "the first is in the controller's pod"
    volumes = {one["name"]: one for one in ranks["spec"]["template"]["spec"]["volumes"]}
    claim = one_of(objects, "StatefulSet")
    (made,) = claim["spec"]["volumeClaimTemplates"]
    assert made["spec"]["accessModes"] == ["ReadWriteMany"]
    name = f"{made['metadata']['name']}-{claim['metadata']['name']}-0"
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == name
    policy = one_of(objects, "NetworkPolicy", "-ranks")["spec"]
    assert "ports" not in policy["ingress"][0]
    (allowed,) = policy["ingress"][0]["from"]
    assert allowed["podSelector"] == policy["podSelector"]
    labels = ranks["spec"]["template"]["metadata"]["labels"]
    (component,) = policy["podSelector"]["matchExpressions"]
    assert labels["app.kubernetes.io/component"] in component["values"]
    assert "generator" not in component["values"]
    assert not [one for one in rendered(chart, {}) if one["metadata"]["name"].endswith("-ranks")]
    for change, said in (
        ({"trainer": {"ranks": 2}}, "trainer.trustedNetwork: true"),
        ({"trainer": {"ranks": 2, "trustedNetwork": True}}, "storage.accessMode: ReadWriteMany"),
    ):
        with pytest.raises(HelmError, match=said):
            rendered(chart, change)


def test_gpus_are_asked_for_where_they_are_used(chart: Chart) -> None:
    made = pods(rendered(chart, EXAMPLES["fleet"]))
    asked = {
        container["name"]: container["resources"].get("limits", {}).get("nvidia.com/gpu")
        for pod in made.values()
        for container in pod["containers"]
    }
    wanted = {"controller": None, "trainer": 1, "generator": 2, "test": None, "targets": None}
    assert asked == wanted


def test_rdma_is_a_resource_an_environment_and_a_capability_of_what_has_gpus(
    chart: Chart,
) -> None:
    gpus, rdma = EXAMPLES["gpus"], EXAMPLES["rdma"]
    trainer = gpus["trainer"] | {
        "resources": {
            "requests": gpus["trainer"]["resources"]["requests"],
            "limits": gpus["trainer"]["resources"]["limits"]
            | rdma["trainer"]["resources"]["limits"],
        }
    }
    more = {"capabilities": ["IPC_LOCK"]} | rdma["controllerPod"]
    made = pods(rendered(chart, gpus | {"trainer": trainer, "controllerPod": more}))
    for pod in made.values():
        for container in pod["containers"]:
            capabilities = container["securityContext"]["capabilities"]
            if container["name"] != "trainer":
                assert capabilities == {"drop": ["ALL"]}, container["name"]
                continue
            assert capabilities == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
            assert container["resources"]["limits"]["rdma/hca"] == 1
            assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in container["env"]
        assert bool(violations(pod)) == any(one["name"] == "trainer" for one in pod["containers"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_lint_finds_nothing(name: str) -> None:
    report = lint(CHART, EXAMPLES[name], strict=True)
    assert not report["errors"]
    assert not [one for one in report["messages"] if one["severity"] > 1]
