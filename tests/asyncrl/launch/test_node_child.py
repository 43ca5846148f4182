"""The child of a node, and that nothing of it stays: in real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bare_host
import pytest
from msgspec import json as msgspec_json

from asyncrl.launch.child_spec import TrainerSpec
from asyncrl.launch.node_child import KEEPER_MODULE, _relay_address, code_version, node_facts
from asyncrl.launch.orphan_reaper import is_last, share


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def start(run: Path, memory: Path, keys: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A process with a child; what the child wrote."""
    (run / "logs").mkdir(parents=True)
    spec = TrainerSpec(
        name="trainer", run_directory=str(run), model_path="", control_address="",
        data_address="", parent=0, threads=1,
        run_id="mine-abc", config_json="the password", weights_directory=str(memory),
    )  # fmt: skip
    order = {
        "name": "trainer",
        "run_id": "mine-abc",
        "shares_run_directory": True,
        "spec": json.loads(msgspec_json.encode(spec)),
        "cwd": str(run),
        "environment": {"ASYNCRL_CONTROLLER_MARK": f"test-{os.getpid()}-{keys}"},
    }
    paths = [str(Path(bare_host.__file__).parent), *sys.path]
    worker = subprocess.Popen(
        [sys.executable, bare_host.__file__, json.dumps(order), keys],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert worker.stdout is not None
    log = Path(worker.stdout.readline().strip())
    assert log == run / "logs" / "trainer.log"
    text = wait_for(lambda: log.read_text(encoding="utf-8"))
    return worker, json.loads(text)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_host_leaves_nothing(tmp_path: Path, *, stopped: bool) -> None:
    """The child ignores SIGTERM or is stopped, and its engine has a session of its own."""
    memory = tmp_path / "memory"
    memory.mkdir()
    for name in ("mine-abc-trainer-weights-0", "mine-abc-exchange", "other-trainer-weights-0"):
        (memory / f"asyncrl-{name}").touch()
    worker, child = start(tmp_path / "run", memory, "keys")
    assert child["heard"] == "keys"
    assert child["parent"]
    assert child["config"] == ["the password", False], "not on the command line"
    assert child["leads"]
    assert child["data_address"] == "tcp://10.1.2.3:*"
    if stopped:
        os.kill(child["pids"][0], signal.SIGSTOP)
    worker.kill()
    worker.communicate()
    wait_for(lambda: not any(map(is_alive, child["pids"])))
    kept = "asyncrl-other-trainer-weights-0"
    wait_for(lambda: {path.name for path in memory.iterdir()} == {kept})


def test_files_stay_while_a_process_that_cannot_be_seen_has_a_keeper(tmp_path: Path) -> None:
    """As in another container that shares this memory."""
    for name in ("trainer-weights-0", "exchange"):
        (tmp_path / f"asyncrl-mine-abc-{name}").touch()
    other = share(tmp_path / "asyncrl-mine-abc-kept")
    worker, child = start(tmp_path / "run", tmp_path, "end")
    worker.communicate(timeout=30)
    wait_for(lambda: not keepers_of(child["pids"][0]))
    assert {path.name for path in tmp_path.glob("asyncrl-*")} == {
        "asyncrl-mine-abc-exchange",
        "asyncrl-mine-abc-kept",
    }
    assert is_last(other)


def test_a_killed_keeper_is_replaced(tmp_path: Path) -> None:
    worker, child = start(tmp_path / "run", tmp_path, "keys")
    first = wait_for(lambda: keepers_of(child["pids"][0]))
    assert len(first) == 1
    os.kill(first[0], signal.SIGKILL)
    second = wait_for(lambda: set(keepers_of(child["pids"][0])) - set(first))
    assert len(second) == 1
    worker.kill()
    worker.communicate()
    wait_for(lambda: not any(map(is_alive, child["pids"])))
    wait_for(lambda: not keepers_of(child["pids"][0]))


def keepers_of(pid: int) -> list[int]:
    """Process ids of the keepers of a child."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_text(encoding="utf-8", errors="replace").split("\0")
            if KEEPER_MODULE in command and str(pid) in command:
                found.append(int(path.parent.name))
    return found


def test_a_child_that_ends_leaves_its_exit_code_and_nothing_else(tmp_path: Path) -> None:
    worker, child = start(tmp_path / "run", tmp_path, "end")
    assert worker.stdout is not None
    with worker.stdout:  # `communicate` does not see what was read together with the first line
        out = worker.stdout.read()
    worker.wait(30)
    code, _, tail = out.partition(" ")
    assert code == "7"
    assert json.loads(tail) == child
    wait_for(lambda: not any(map(is_alive, child["pids"])))


def test_the_processes_of_a_node_meet_at_one_address() -> None:
    addresses = {
        _relay_address(run, place) for run in ("a", "b") for place in ("m", "n") for _ in range(2)
    }
    assert len(addresses) == 4
    assert all(address.startswith("ipc:///") and len(address) < 107 for address in addresses)


def test_a_node_is_described(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    question = {
        "token_file": str(token), "token": "t", "model": str(tmp_path),
        "weights_directory": str(tmp_path),
    }  # fmt: skip
    found = node_facts(question)
    assert found["shares_run_directory"]
    assert found["has_model"]
    assert found["asyncrl"] == code_version()
    found = node_facts(question | {"token_file": str(tmp_path / "none"), "model": str(token)})
    assert not found["shares_run_directory"]
    assert not found["has_model"]
