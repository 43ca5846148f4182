"""The GPUs of a machine, from nvidia-smi as it answers and from /proc; here both are stand-ins."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from fake_processes import generator_spec, spec

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.errors import UserError
from asyncrl.launch import gpus
from asyncrl.launch.child_spec import keys_of
from asyncrl.launch.gpus import (
    driver_version,
    find_gpus,
    parse_list,
    parse_query,
    torch_build,
)
from asyncrl.launch.local import LocalLauncher
from asyncrl.launch.records import ProcessRecords
from asyncrl.startup import devices
from asyncrl.startup.devices import engine_device, place
from asyncrl.wire import RunKey

WHOLE = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa11)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb22)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-cc33)
"""
DIVIDED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa11)
  MIG 3g.20gb     Device  0: (UUID: MIG-11)
  MIG 3g.20gb     Device  1: (UUID: MIG-22)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb22)
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi in a PATH of its own."""
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "PROC", tmp_path / "none")
    return path


def answers(path: Path, listed: str, code: int = 0) -> None:
    lines = [line for line in listed.splitlines() if line.startswith("GPU")]
    memory = "".join(f"{line.partition('UUID: ')[2].rstrip(')')}, 81559, 9.0\n" for line in lines)
    texts = (f"echo {shlex.quote(text)}" for text in (listed, memory))
    path.write_text(
        '#!/bin/sh\nif [ "$1" = -L ]; then {}; else {}; fi\n'.format(*texts) + f"exit {code}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_version_of_the_driver(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "PROC_VERSION", smi.parent / "version")
    assert driver_version() is None
    (smi.parent / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    assert driver_version() == "580.65.06"
    smi.write_text(
        '#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] && echo 535.104 && echo 535.104'
    )
    smi.chmod(0o755)
    assert driver_version() == "535.104"
    smi.write_text("#!/bin/sh\necho Failed to initialize NVML\nexit 9\n")
    assert driver_version() is None


def test_whole_gpus(smi: Path) -> None:
    answers(smi, WHOLE)
    found = find_gpus()
    assert [(g.name, g.uuid, g.number, g.memory_mib) for g in found] == [
        ("0", "GPU-aa11", 0, 81559), ("1", "GPU-bb22", 1, 81559), ("2", "GPU-cc33", 2, 81559),
    ]  # fmt: skip
    assert str(found[1]) == "1 (NVIDIA H100 80GB HBM3, 80 GiB)"
    assert {gpu.capability for gpu in found} == {(9, 0)}


def test_an_older_nvidia_smi_does_not_know_capabilities(smi: Path) -> None:
    answers(smi, WHOLE)
    refused = (
        'case "$2$1" in *compute_cap*) echo Field is not a valid field to query.; exit 2;; esac'
    )
    told = smi.read_text().replace(", 9.0", "")
    smi.write_text(told.replace("#!/bin/sh", f"#!/bin/sh\n{refused}"))
    assert [(gpu.memory_mib, gpu.capability) for gpu in find_gpus()] == [(81559, None)] * 3


def test_a_part_has_the_capability_of_its_gpu(smi: Path) -> None:
    answers(smi, DIVIDED)
    found = find_gpus()
    assert [(gpu.memory_mib, gpu.capability) for gpu in found] == [
        (None, (9, 0)), (None, (9, 0)), (81559, (9, 0)),
    ]  # fmt: skip


def test_what_nvidia_smi_does_not_know_is_left_out() -> None:
    told = "GPU-a, [N/A], 12.1\nGPU-b, 24576, [N/A]\nGPU-c, 24576\n"
    assert parse_query(told) == ({"GPU-b": 24576, "GPU-c": 24576}, {"GPU-a": (12, 1)})


def test_a_divided_gpu_is_given_by_its_parts() -> None:
    found = parse_list(DIVIDED)
    assert [gpu.name for gpu in found] == ["MIG-11", "MIG-22", "1"]
    assert [gpu.is_part for gpu in found] == [True, True, False]


def test_a_driver_that_does_not_answer(smi: Path) -> None:
    answers(smi, "NVIDIA-SMI has failed because it couldn't communicate with the driver", 9)
    with pytest.raises(UserError, match=r"couldn't communicate.*launcher.gpus: \[\]"):
        find_gpus()
    assert place(load_config(None, ["launcher.gpus=[]"])) is not None


@pytest.mark.parametrize("visible", [None, "0,1"])
def test_a_run_that_may_use_no_gpu_sees_none(
    visible: str | None, smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `auto` devices would find the first GPU."""
    answers(smi, WHOLE)
    with_cuda(monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan = place(load_config(None, ["launcher.gpus=[]"]))
    assert plan is not None
    for name in ("generator-0", "trainer"):
        assert plan.environment(name)["CUDA_VISIBLE_DEVICES"] == ""
    assert engine_device(plan) == "cpu"
    with pytest.raises(UserError, match=r"launcher\.gpus leave none"):
        place(load_config(None, ["launcher.gpus=[]", "trainer.device=cuda"]))


def test_without_nvidia_smi_from_proc(smi: Path, tmp_path: Path) -> None:
    for address, uuid in (("0000:81:00.0", "GPU-b"), ("0000:01:00.0", "GPU-a")):
        folder = tmp_path / "none" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA L20\nIRQ:   \t\t 88\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
        )
    found = find_gpus()
    assert [(g.name, g.uuid, g.model) for g in found] == [
        ("0", "GPU-a", "NVIDIA L20"), ("1", "GPU-b", "NVIDIA L20"),
    ]  # fmt: skip


def test_a_machine_without_a_gpu(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as left over in many a CI
    assert place(RunConfig()) is None
    assert engine_device(None) is None
    with pytest.raises(UserError, match=r"^engine.device: cuda needs a GPU, and .*auto"):
        place(load_config(None, ["engine.device=cuda"]))
    with pytest.raises(UserError, match="GPU '0' is not there; this machine has none"):
        place(load_config(None, ["launcher.gpus=[0]"]))


def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: gpus.TorchBuild("2.13.0+cu130", "13.0"))


def test_the_plan_of_a_configuration(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(smi, WHOLE)
    with_cuda(monkeypatch)
    tp = ["engine.kind=vllm", "engine.vllm.tensor_parallel_size=2"]
    plan = place(load_config(None, tp))
    assert plan is not None
    assert plan.environment("generator-0")["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert plan.environment("trainer")["CUDA_VISIBLE_DEVICES"] == "2"
    assert engine_device(plan) == "cuda"
    plan = place(load_config(None, ["engine.device=cpu", "launcher.generators=9"]))
    assert plan is not None
    assert engine_device(plan) == "cpu"
    assert plan.environment("trainer")["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    plan = place(RunConfig())
    assert plan is not None
    assert plan.environment("generator-0") == {"CUDA_VISIBLE_DEVICES": "2"}
    assert plan.environment("trainer") == {"CUDA_VISIBLE_DEVICES": "1"}
    with pytest.raises(UserError, match="need 3 GPUs, and this run may use 2"):
        place(load_config(None, tp))


def test_a_torch_for_the_cpu_uses_no_gpu(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(smi, WHOLE)
    monkeypatch.setattr(devices, "torch_build", lambda: gpus.TorchBuild("2.13.0+cpu", None))
    assert engine_device(place(RunConfig())) == "cpu"
    with pytest.raises(UserError, match=r"trainer.device: cuda .*2.13.0\+cpu is built for the CPU"):
        place(load_config(None, ["trainer.device=cuda"]))


def test_the_build_of_torch_is_known_without_importing_it() -> None:
    import torch

    assert torch_build() == gpus.TorchBuild(torch.__version__, torch.version.cuda)
    code = (
        "import sys; from asyncrl.startup.devices import place; "
        "from asyncrl.config.run_config import RunConfig; "
        "place(RunConfig()); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "False"


def test_a_child_sees_its_own_gpus_only(
    smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(smi, WHOLE)
    with_cuda(monkeypatch)
    launcher = LocalLauncher(
        tmp_path, ProcessRecords(tmp_path), generators=1, threads=1, gpus=place(RunConfig())
    )
    seen: dict[str, str] = {}
    real = subprocess.Popen

    def popen(*args: object, env: dict[str, str], **more: object) -> subprocess.Popen[bytes]:
        seen[str(len(seen))] = env["CUDA_VISIBLE_DEVICES"]
        return real(*args, env=env, **more)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(subprocess, "Popen", popen)
    for given in (spec(), generator_spec()):
        # Its parent is another process, so the child exits at once.
        one = msgspec.structs.replace(given, run_directory=str(tmp_path), parent=1)
        handle = launcher.start(one, keys_of(RunKey.new(), one.name, one.role))
        handle.end(by_force=True)
        handle._process.wait()  # type: ignore[attr-defined]
    assert seen == {"0": "1", "1": "0"}
