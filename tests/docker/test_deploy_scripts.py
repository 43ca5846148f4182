"""What of tests/deploy can be checked without Docker and Kubernetes; `make test-deploy` runs it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from helm_python.chart import Chart

from asyncrl.config.run_config import load_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    path for folder in ("tests/deploy", "docker") for path in sorted((ROOT / folder).rglob("*.sh"))
]


@pytest.fixture(scope="module")
def drive() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "drive", ROOT / "tests/deploy/kubernetes/drive.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_shell_can_read_every_script() -> None:
    assert len(SCRIPTS) >= 7
    for path in SCRIPTS:
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr


def test_a_script_names_files_that_exist() -> None:
    """`$here/NAME`, where `here` is the script's folder."""
    missing = [
        f"{path.name}: {name}"
        for path in SCRIPTS
        for name in re.findall(r"\$here/([\w/.-]+\.(?:sh|py))", path.read_text(encoding="utf-8"))
        if not (path.parent / name).exists()
    ]
    assert not missing


def test_the_chart_takes_the_values_of_the_test_on_a_cluster(
    drive: ModuleType, tmp_path: Path
) -> None:
    values = drive.values("docker.io/library/asyncrl:test", "test")
    with Chart.load(ROOT / "docker/chart") as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=drive.RELEASE, namespace=drive.NAMESPACE)
    objects = [
        one for text in files.values() if "kind:" in text for one in yaml.safe_load_all(text)
    ]
    (made,) = [one for one in objects if "run.yaml" in (one or {}).get("data", {})]
    (tmp_path / "run.yaml").write_text(made["data"]["run.yaml"], encoding="utf-8")
    config = load_config(tmp_path / "run.yaml", [])
    assert f"{config.run.directory}/{config.run.name}" == drive.RUN
    assert config.scheduler.groups_per_step == 4
    (workload,) = [one for one in objects if one["kind"] == "StatefulSet"]
    assert f"{workload['metadata']['name']}-0" == drive.CONTROLLER
    claims = [one["metadata"]["name"] for one in workload["spec"]["volumeClaimTemplates"]]
    assert claims == ["runs"]
