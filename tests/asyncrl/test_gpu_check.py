"""`asyncrl gpu-check`: the runner with stand-ins for parts, and the command on this machine."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import pytest
import stand_in_parts
import torch

from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.errors import UserError
from asyncrl.gpu_check import child, command, machine
from asyncrl.gpu_check.parts import PARTS, Context, Part, PartFailed, Verdict
from asyncrl.gpu_check.runner import LIMIT_FACTOR, ROOT, run_part, run_parts
from asyncrl.launch.gpus import Gpu
from asyncrl.wire.records.noise_floor import NoiseFloor

SUPPORT = Path(stand_in_parts.__file__).parent


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of parts find them."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


def part(function: Callable[[Context], Any], **more: Any) -> Part:
    name = function.__name__
    return Part(name, name, f"stand_in_parts:{name}", **{"seconds": 60.0, **more})


def here(folder: Path, gpus: int = 0) -> Context:
    return Context(folder, gpus, small=True)


def test_each_part_gets_a_verdict_whatever_becomes_of_those_before(tmp_path: Path) -> None:
    parts = [
        part(stand_in_parts.dies),
        part(stand_in_parts.breaks),
        part(stand_in_parts.finds_a_fault),
        part(stand_in_parts.cannot_run),
        part(stand_in_parts.goes_well, packages=("vllm",)),
        part(stand_in_parts.goes_well, gpus=2),
        part(stand_in_parts.goes_well, gpus=2, or_cpu=True),
    ]
    said: list[Verdict] = []
    found = run_parts(parts, here(tmp_path), limit_seconds=600, say=said.append, missing=["vllm"])
    assert found == said
    assert [(one.verdict, one.sentence) for one in found] == [
        ("failed", "its process ended with signal SIGKILL"),
        ("failed", "ValueError: no such kernel"),
        ("failed", "two and two are five"),
        ("left out", "there is no such engine"),
        ("left out", "vllm is not installed"),
        ("left out", "needs two GPUs, torch sees none"),
        ("ok", "cpu, small"),
    ]
    assert found[0].last_lines == ["last words"]
    assert found[1].last_lines[0] == "before it broke"
    assert found[1].last_lines[-2:] == ["ValueError: no such kernel", "and more"]
    assert found[2].numbers == {"sum": 5}
    assert found[-1].numbers == {"gpus": 0}
    assert found[-1].last_lines == []


def jumping(folder: Path) -> Callable[[], float]:
    """A clock that stands until the part that hangs has begun, and is then an hour later."""
    return lambda: 3600.0 if (folder / "begun").exists() else 0.0


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    verdict = run_part(part(stand_in_parts.hangs), here(tmp_path), clock=jumping(tmp_path))
    assert verdict.verdict == "failed"
    assert verdict.sentence == (
        "did not end within its limit of 60 s; it last printed: waiting for ever"
    )
    with (tmp_path / "lock").open() as lock:  # held as long as its child lives
        deadline = time.monotonic() + 60
        while not _locks(lock):
            assert time.monotonic() < deadline, "its child lives"


def _locks(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_program_of_a_part_that_is_ended_gives_back_what_it_holds(tmp_path: Path) -> None:
    waiting = part(stand_in_parts.waits_for_a_run)
    assert run_part(waiting, here(tmp_path), clock=jumping(tmp_path)).verdict == "failed"
    assert (tmp_path / "begun").exists()
    assert not (tmp_path / "held").exists()


def test_a_process_that_cannot_be_ended_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert timeout is not None
        real_wait(process)
        raise subprocess.TimeoutExpired(process.args, timeout)

    real_wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", waits)
    verdict = run_part(part(stand_in_parts.hangs), here(tmp_path), clock=jumping(tmp_path))
    assert verdict.sentence.endswith("even SIGKILL did not end its process, which is left behind")


def test_limits_of_parts_grow_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_FACTOR, "2.5")
    hanging = part(stand_in_parts.hangs, seconds=100.0)
    found = run_parts([hanging], here(tmp_path), limit_seconds=1e6, say=print, missing=[],
                      clock=jumping(tmp_path))  # fmt: skip
    assert found[0].sentence.startswith("did not end within its limit of 250 s")


def test_what_the_limit_of_all_parts_cuts_off_is_left_out(tmp_path: Path) -> None:
    parts = [part(stand_in_parts.hangs, seconds=9000.0), part(stand_in_parts.goes_well)]
    found = run_parts(
        parts, here(tmp_path), limit_seconds=1200, say=lambda _: None, clock=jumping(tmp_path)
    )
    assert [(one.verdict, one.sentence) for one in found] == [
        ("left out", "no time was left after 3600 s of it (--limit-minutes)"),
        ("left out", "no time is left (--limit-minutes)"),
    ]


def test_a_check_writes_what_it_found_and_says_whether_anything_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Verdict("discovery", "ok", "torch sees 0", numbers={"gpus": 0})
    monkeypatch.setattr(command, "count_gpus", lambda _folder: found)
    lines: list[str] = []
    files = tmp_path / "new" / "check.json", tmp_path / "new" / "check.html"
    parts = [part(stand_in_parts.goes_well), part(stand_in_parts.breaks)]
    assert not command.check(parts, lines.append, 600, None, *files)
    assert lines[0] == (
        "torch sees no GPU: every part in its smallest size, no number is a measurement"
    )
    assert lines[-1] == "1 ok, 1 failed, 0 left out"
    record = json.loads(files[0].read_text())
    assert record.keys() == {
        "name", "date", "small", "gpus", "machine", "versions", "counts", "parts",
    }  # fmt: skip
    assert (record["name"], record["small"], record["gpus"]) == ("gpu-check", True, 0)
    assert record["counts"] == {"ok": 1, "failed": 1, "left out": 0}
    assert record["machine"]["cores"] > 0
    assert record["versions"]["torch"]
    assert all(one.keys() == asdict(Verdict("", "ok", "")).keys() for one in record["parts"])
    page = files[1].read_text()
    assert "goes_well" in page
    assert "ValueError: no such kernel" in page
    assert command.check(parts[:1], lines.append, 600)
    found.verdict, found.sentence, found.numbers = "failed", "RuntimeError: no driver", {}
    assert not command.check(parts[:1], lines.append, 600, None, *files)
    assert lines[-1] == "1 ok, 1 failed, 0 left out"
    assert json.loads(files[0].read_text())["parts"][0]["sentence"] == "RuntimeError: no driver"


def test_a_machine_whose_gpu_torch_does_not_see_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "_doctor", list)
    monkeypatch.setattr(machine, "_nvidia_smi", list)
    monkeypatch.setattr(machine, "find_gpus", lambda: [Gpu("0", "GPU-0", "L20", 46068, 0)])
    with pytest.raises(PartFailed, match=r"sees no GPU; there are 1: 0 \(L20, 45 GiB\)"):
        machine.driver(here(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user's choice
    assert "no GPU" in machine.driver(here(tmp_path))[0]

    def silent() -> list[Gpu]:
        raise UserError("nvidia-smi does not say")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(machine, "find_gpus", silent)
    with pytest.raises(PartFailed, match="sees no GPU; nvidia-smi does not say"):
        machine.driver(here(tmp_path))


def test_parts_are_chosen_by_name_and_stay_in_order() -> None:
    assert command.chosen(None) == list(PARTS)
    assert [one.name for one in command.chosen("draws, driver")] == ["driver", "draws"]
    with pytest.raises(UserError, match=r"--only kernal: this is not a part .* Did you mean 'kern"):
        command.chosen("driver,kernal")


@pytest.mark.parametrize("one", PARTS, ids=lambda one: one.name)
def test_the_function_of_a_part_exists(one: Part) -> None:
    module, _, name = one.function.partition(":")
    path = ROOT / f"{module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    assert name in functions | {one.id for one in targets if isinstance(one, ast.Name)}


def test_a_part_says_which_packages_it_lacks() -> None:
    wanted = Part("p", "", "", 1.0, ("msgspec", "zmq", "vllm"))
    assert wanted.lacks(0, ["zmq", "msgspec", "numba"]).startswith(
        "msgspec and pyzmq are not installed; `make gpu-bundle`"
    )
    assert wanted.lacks(0, ["vllm"]) == "vllm is not installed"
    assert wanted.lacks(0, []) == ""
    assert Part("p", "", "", 1.0, gpus=2).lacks(1, []) == "needs two GPUs, torch sees 1"
    assert Part("p", "", "", 1.0, gpus=2, or_cpu=True).lacks(1, []) != ""


def test_the_table_of_parts_and_the_runner_need_no_package() -> None:
    """Or a machine that lacks one would not be told so."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import asyncrl.gpu_check.command"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_chi_square_finds_what_is_wrong_and_nothing_else() -> None:
    from asyncrl.gpu_check.drawing import FALSE_ALARM, chi_square_p

    expected = [600.0, 300.0, 92.0, 4.0, 4.0, 0.0]
    assert chi_square_p([600, 300, 92, 8, 0, 0], expected) == 1.0  # 4 and 4 count together
    assert chi_square_p([590, 310, 92, 4, 4, 0], expected) > 0.5
    assert chi_square_p([480, 420, 92, 4, 4, 0], expected) < FALSE_ALARM
    assert chi_square_p([599, 300, 92, 4, 4, 1], expected) == 0.0
    assert chi_square_p([40, 60], [50.0, 50.0]) == pytest.approx(0.0455, abs=1e-4)  # two sigmas


def test_draws_of_another_distribution_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl.engine.sampling import logits
    from asyncrl.gpu_check.drawing import draws

    right = logits.distributions_of
    assert "follow three distributions" in draws(here(tmp_path))[0]
    monkeypatch.setattr(
        logits, "distributions_of", lambda given, *others: right(given * 1.2, *others)
    )
    with pytest.raises(PartFailed, match="do not follow the distribution: plain: p ="):
        draws(here(tmp_path))


def test_a_variant_that_crashes_is_not_one_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl.gpu_check import generating

    raised: dict[str, Exception] = {}

    async def measure(case: generating.Case, _path: Path) -> generating.Found:
        if error := raised.get(next(iter(case.engine))):
            raise error
        return generating.Found(NoiseFloor(), 0.0, 0.0)

    monkeypatch.setattr(generating, "random_model", lambda context: context.folder)
    monkeypatch.setattr(generating, "measure", measure)
    numbers = generating.noise_floor(here(tmp_path))[1]
    assert "has no effect with the torch engine" in numbers["batch-invariant"]

    raised["batch_invariant"] = EngineStartError("needs compute capability 8.0")
    numbers = generating.vllm_noise_floor(here(tmp_path))[1]
    assert numbers["batch-invariant"] == "refused: needs compute capability 8.0"
    for error in (EngineError("capability"), EngineStartError("out of memory")):
        raised["batch_invariant"] = error
        with pytest.raises(PartFailed, match=f"batch-invariant: {type(error).__name__}: {error}"):
            generating.vllm_noise_floor(here(tmp_path))
    raised["logits_dtype"] = EngineStartError("no capability")
    with pytest.raises(PartFailed, match="logits in the model's type: EngineStartError"):
        generating.noise_floor(here(tmp_path))


def test_vllm_alone_gets_nothing_of_what_the_engine_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl.gpu_check import generating

    def engine_part(*_arguments: Any) -> tuple[str, dict[str, Any]]:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        return "vLLM", {"tokens_a_second": 10.0}

    def run(_command: list[str], *, env: dict[str, str], **_named: Any) -> Any:
        given.update(env)
        return subprocess.CompletedProcess("", 1)

    given: dict[str, str] = {}
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(generating, "_engine_part", engine_part)
    monkeypatch.setattr(generating, "random_model", lambda context: context.folder)
    monkeypatch.setattr(subprocess, "run", run)
    assert generating.vllm(here(tmp_path))[0] == "vLLM; `vllm bench latency` failed"
    assert "PATH" in given
    assert "VLLM_USE_V2_MODEL_RUNNER" not in given


def test_speeds_are_said_in_units_that_show_them() -> None:
    from asyncrl.gpu_check.training import shown_flops

    assert [shown_flops(one) for one in (7.3e14, 1e11, 3.1e9)] == [
        "730.00 TFLOP/s", "0.10 TFLOP/s", "3.1 GFLOP/s",
    ]  # fmt: skip


def test_two_ranks_get_a_gpu_each_of_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asyncrl.gpu_check.two_ranks import devices

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices(rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert [devices(rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["GPU-a", "GPU-b"]


def _in_this_process(tmp_path: Path, name: str) -> dict[str, Any]:
    """The numbers of a part, by what its process would run."""
    (one,) = command.chosen(name)
    said = child._said(one.function, here(tmp_path))
    assert said["verdict"] == "ok", said
    numbers: dict[str, Any] = json.loads(json.dumps(said))["numbers"]
    return numbers


HERE = ("draws", "engine", "trainer", "noise-floor", "weights", "run", "nccl", "ranks")
"""Parts that are tested in this process: one of their own imports torch and transformers first.

The processes of the last three are forked.
"""


@pytest.mark.slow
@pytest.mark.usefixtures("_forked_runs")
def test_a_cpu_runs_every_part_that_needs_no_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs the others, in the next test."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of `asyncrl run`
    numbers = {name: _in_this_process(tmp_path, name) for name in HERE}
    assert numbers["engine"]["steps"] >= 20
    assert numbers["trainer"]["mfu"] > 0
    assert numbers["run"]["steps"] == 2
    assert numbers["nccl"]["equal"]
    assert numbers["ranks"].keys() == {"rank 0", "rank 1"}


@pytest.mark.slow
def test_the_command_runs_what_a_cpu_can_and_names_the_other_parts(tmp_path: Path) -> None:
    file = tmp_path / "gpu-check.json"
    asked = ["--small", "--json", str(file)]
    asked += ["--limit-minutes", "600"]  # what is tested is not how busy this machine is
    asked += ["--only", ",".join(one.name for one in PARTS if one.name not in HERE)]
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "gpu-check", *asked],
        cwd=ROOT,
        env=os.environ | {LIMIT_FACTOR: "10"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    if record["gpus"]:
        pytest.skip("there is a GPU here")
    left_out = {one["part"]: one["sentence"] for one in record["parts"] if one["verdict"] != "ok"}
    assert left_out.keys() == {
        "attention", "vllm", "vllm-drafts", "vllm-weights", "vllm-noise-floor", "vllm-tp2",
        "sglang",
    }  # fmt: skip
    assert all("GPU" in why or "not installed" in why for why in left_out.values()), left_out
    ok = {one["part"] for one in record["parts"]} - left_out.keys()
    assert ok == {"driver", "compiler", "kernels"}
