"""Checks of docker/compose.yaml that need no Docker; tests/deploy/compose.sh runs it for real."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.run_config import load_config

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker/compose.yaml"
GPU_FILE = ROOT / "docker/compose.gpu.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONE_SHOT = "keys"


def default(value: str) -> str:
    """The text that Compose puts in place of `${NAME:-text}` if NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def networks(name: str) -> list[str]:
    if SERVICES[name].get("network_mode") == "none":
        return []
    return list(SERVICES[name]["networks"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_few_rights_and_bounds(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].partition(":")[0]) > 0
    assert not {"privileged", "cap_add", "pid", "ipc", "devices"} & set(service)
    limits = service["deploy"]["resources"]["limits"]
    assert set(limits) == {"cpus", "memory", "pids"}
    assert "shm_size" in service
    assert service["logging"]["options"]["max-size"]
    assert any("size=" in mount for mount in service["tmpfs"])


@pytest.mark.parametrize("name", [name for name in SERVICES if name != ONE_SHOT])
def test_a_service_is_watched_and_started_again(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] in ("unless-stopped", "on-failure")


def test_a_service_waits_for_what_it_needs() -> None:
    waits = {
        name: {other: how["condition"] for other, how in service.get("depends_on", {}).items()}
        for name, service in SERVICES.items()
    }
    # Compose stops in the opposite order: the controller before the trainer that saves for it.
    assert waits["controller"]["trainer"] == waits["controller"]["generator"] == "service_healthy"
    for name, conditions in waits.items():
        for other, condition in conditions.items():
            one_shot = other == ONE_SHOT
            assert (condition == "service_completed_successfully") == one_shot, (name, other)
    assert set(waits["trainer"]) == set(waits["generator"]) == {ONE_SHOT}


@pytest.mark.parametrize("name", ["trainer", "generator"])
def test_an_agent_may_end_by_itself(name: str) -> None:
    (grace,) = [word for word in SERVICES[name]["command"] if word.startswith("--grace=")]
    stop = SERVICES[name]["stop_grace_period"]
    assert int(stop.removesuffix("s")) >= int(grace.partition("=")[2]) + 15, "docs/deploy.md"


def test_ports_are_published_on_loopback_only() -> None:
    published = {
        name: default(port) for name, one in SERVICES.items() for port in one.get("ports", [])
    }
    assert set(published) == {"controller", "grafana"}
    assert all(port.startswith("127.0.0.1:") for port in published.values())


def test_trainer_and_generators_reach_nothing_outside() -> None:
    outside = {
        name for name in COMPOSE["networks"] if not COMPOSE["networks"][name].get("internal")
    }
    assert outside == {"pages"}
    assert {name for name in SERVICES if outside & set(networks(name))} == {"controller", "grafana"}
    assert networks(ONE_SHOT) == []


def test_a_secret_is_seen_by_those_alone_who_need_it() -> None:
    writable, seen = set(), set()
    for name, service in SERVICES.items():
        for mount in service["volumes"]:
            source = mount["source"] if isinstance(mount, dict) else mount.partition(":")[0]
            if source in ("agents-key", "web-token"):
                seen.add((name, source))
                if not (isinstance(mount, dict) and mount.get("read_only")):
                    writable.add(name)
    assert writable == {ONE_SHOT}
    assert {name for name, source in seen if source == "web-token"} == {ONE_SHOT, "controller"}
    assert {name for name, source in seen if source == "agents-key"} == {
        ONE_SHOT, "controller", "trainer", "generator",
    }  # fmt: skip
    assert not any(
        "environment" in SERVICES[name] for name in ("controller", "trainer", "generator")
    )


def test_mounted_files_exist() -> None:
    sources = [
        mount.split(":")[0]
        for service in SERVICES.values()
        for mount in service["volumes"]
        if isinstance(mount, str) and mount.startswith(".")
    ]
    assert sources
    assert not [source for source in sources if not (FILE.parent / source).exists()]


def test_the_controllers_command_is_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [default(word) for word in SERVICES["controller"]["command"]]
    assert command[0] == "run"
    assert "--continue" in command
    overrides = [word.removeprefix("--set=") for word in command if word.startswith("--set=")]
    monkeypatch.chdir(ROOT)
    config = load_config(Path(command[1]), overrides)
    assert config.launcher.kind == "agents"
    port = config.launcher.agents.listen.rpartition(":")[2]
    for name in ("trainer", "generator"):
        assert f"--controller=controller:{port}" in SERVICES[name]["command"]
        assert f"--role={name}" in SERVICES[name]["command"]
    assert SERVICES["controller"]["ports"][0].endswith(f":{config.monitoring.web.port}")


def test_prometheus_reads_what_the_configuration_names() -> None:
    config = yaml.safe_load((ROOT / "monitoring/prometheus.yml").read_text(encoding="utf-8"))
    (files,) = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    folder = os.path.normpath(Path("/etc/asyncrl/monitoring") / Path(files).parent)
    targets = [m["target"] for m in SERVICES["prometheus"]["volumes"] if isinstance(m, dict)]
    assert targets == [folder]


def test_grafana_is_given_the_data_source_and_the_dashboard() -> None:
    (source,) = yaml.safe_load(
        (ROOT / "docker/grafana/datasources/prometheus.yaml").read_text(encoding="utf-8")
    )["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load(
        (ROOT / "docker/grafana/dashboards/asyncrl.yaml").read_text(encoding="utf-8")
    )["providers"]
    folder = provider["options"]["path"]
    assert f"../monitoring/dashboards:{folder}:ro" in SERVICES["grafana"]["volumes"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(folder)
    assert (ROOT / "monitoring/dashboards" / Path(home).name).exists()


def test_the_gpu_file_changes_only_services_that_exist() -> None:
    gpu = yaml.safe_load(GPU_FILE.read_text(encoding="utf-8"))["services"]
    assert set(gpu) == {"keys", "controller", "trainer", "generator"}
    images = {service["image"] for service in gpu.values()}
    assert len(images) == 1  # agents of another version are refused
    for name in ("trainer", "generator"):
        (device,) = gpu[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]


def test_one_gpu_is_enough_and_vllm_can_be_told_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    gpu = yaml.safe_load(GPU_FILE.read_text(encoding="utf-8"))["services"]
    ids = [
        default(gpu[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"][0])
        for name in ("trainer", "generator")
    ]
    assert ids == ["0", "0"]
    words = [
        word.replace("{ASYNCRL_KV_GIB:-null}", "4") for word in SERVICES["controller"]["command"]
    ]
    told = [
        default(word.replace("$4", "4")).removeprefix("--set=") for word in words if "vllm." in word
    ]
    vllm = load_config(None, told).engine.vllm
    assert (vllm.kv_cache_gib, vllm.gpu_memory_utilization) == (4, None)


def test_what_is_compiled_at_run_time_may_be_executed() -> None:
    """A tmpfs of Docker's is noexec; volumes are not. Inductor alone would start 32 processes."""
    text = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
    folders = dict(re.findall(r"\b(TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR)=(\S+)", text))
    assert len(folders) == 2
    assert re.search(r"TORCHINDUCTOR_COMPILE_THREADS=8\b", text)
    for name in ("trainer", "generator"):
        service = SERVICES[name]
        mounted = [one.split(":") for one in service["volumes"] if isinstance(one, str)]
        for folder in folders.values():
            assert any(folder.startswith(f"{mount[1]}/") for mount in mounted), (name, folder)
        assert service["deploy"]["resources"]["limits"]["pids"] == 4096


def has_compose() -> bool:
    found = shutil.which("docker")
    return (
        found is not None
        and not subprocess.run(
            [found, "compose", "version"], capture_output=True, check=False
        ).returncode
    )


@pytest.mark.skipif(not has_compose(), reason="there is no `docker compose` here")
@pytest.mark.parametrize("files", [[FILE], [FILE, GPU_FILE]], ids=["cpu", "gpu"])
def test_compose_accepts_the_files(files: list[Path]) -> None:
    arguments = [word for file in files for word in ("-f", str(file))]
    done = subprocess.run(
        ["docker", "compose", *arguments, "config", "--quiet"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
