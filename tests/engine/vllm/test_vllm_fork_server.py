"""Cores of vLLM are forked on a CPU: as any process of vLLM's, with what its starter has now."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served_engine import Served
from served_vllm import REAL_VLLM

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineStartError
from asyncrl.engine.vllm.client.fork_server import ForkContext, forks, in_a_fork, start_server
from asyncrl.engine.vllm.config import VllmConfig

pytestmark = REAL_VLLM
SECONDS = 120.0


@pytest.fixture(autouse=True)
def _server() -> None:
    """Not one without vLLM, which later engines of this process would be forked from."""
    start_server()


def started(path: Path) -> Any:
    """A process that writes a variable and torch's threads to a file, and ends with status 3."""
    script = f"""
import os, pathlib, torch
told = f"{{os.environ.get('TOLD')}} {{torch.get_num_threads()}}"
pathlib.Path({str(path)!r}).write_text(told)
os._exit(3)
"""
    process = ForkContext().Process(target=exec, args=(script,))
    process.start()
    return process


def test_a_core_has_the_variables_and_threads_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server runs since the first start, and has those of then."""
    for value, threads in (("one", "1"), ("two", "2")):
        monkeypatch.setenv("TOLD", value)
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        process = started(tmp_path / value)
        process.join(SECONDS)
        assert process.exitcode == 3
        assert (tmp_path / value).read_text(encoding="utf-8") == f"{value} {threads}"
    monkeypatch.delenv("TOLD")
    started(tmp_path / "none").join(SECONDS)
    assert (tmp_path / "none").read_text(encoding="utf-8") == "None 2"


def test_all_who_ask_learn_how_it_ended(tmp_path: Path) -> None:
    """vLLM's thread that watches the core, and ours: the server tells it once."""
    for attempt in range(10):
        wait = started(tmp_path / f"{attempt}")._popen.wait
        with ThreadPoolExecutor(8) as threads:
            assert [*threads.map(wait, [SECONDS] * 8)] == [3] * 8
    killed = ForkContext().Process(target=signal.pause)
    killed.start()
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(SECONDS)
    assert killed.exitcode == -signal.SIGKILL


def test_the_shared_engine_was_forked(served: Served) -> None:
    """Its parent is the server, not this process, and it has vLLM's title."""
    if not forks(EngineConfig(kind="vllm")):
        pytest.skip("this vLLM runs on a GPU: its core is spawned")
    (core,) = served.processes()
    status = Path(f"/proc/{core}/status").read_text(encoding="utf-8")
    (parent,) = [line.split()[1] for line in status.splitlines() if line.startswith("PPid:")]
    command = Path(f"/proc/{parent}/cmdline").read_bytes()
    assert int(parent) != os.getpid()
    assert b"multiprocessing.forkserver" in command
    assert b"EngineCore" in Path(f"/proc/{core}/cmdline").read_bytes()


def test_what_looks_at_a_models_class_is_forked() -> None:
    """It finds vLLM there."""
    assert in_a_fork(lambda: ("vllm" in sys.modules, os.getpid()), SECONDS)[0]
    assert in_a_fork(os.getpid, SECONDS) != os.getpid()


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (lambda: 1 / 0, r"class is: Traceback (.|\n)*\nZeroDivisionError: division by zero\n"),
        (lambda: threading.Lock(), r"(.|\n)*cannot pickle '_thread.lock' object"),
        (lambda: os._exit(3), "class is: it ended with exit code 3, without an answer"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "it ended with exit code -9"),
    ],
)
def test_what_a_look_at_a_models_class_said_is_in_the_error(
    look: Callable[[], object], said: str
) -> None:
    with pytest.raises(EngineStartError, match=said):
        in_a_fork(look, SECONDS)


def test_a_look_at_a_models_class_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    """And its process is killed."""
    place = tmp_path / "pid"

    def look() -> None:
        place.write_text(str(os.getpid()))
        signal.pause()

    in_a_fork(os.getpid, SECONDS)  # the server has imported vLLM
    with pytest.raises(EngineStartError, match="waited 3 s for a process with vLLM to look at"):
        in_a_fork(look, 3.0)
    ends = time.monotonic() + SECONDS
    while place.exists() and Path(f"/proc/{place.read_text()}").exists():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_a_server_that_does_not_import_vllm_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def start(_self: object) -> None:
        ended.wait(SECONDS)
        raise EOFError

    monkeypatch.setattr(ForkContext.Process, "start", start)
    with pytest.raises(EngineStartError, match=r"waited 0.1 s for vLLM to be imported"):
        in_a_fork(os.getpid, 0.1)
    ended.set()


def test_a_server_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_self: object) -> None:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr(ForkContext.Process, "start", start)
    with pytest.raises(EngineStartError, match="could not be forked: EOFError"):
        in_a_fork(os.getpid, SECONDS)


def test_a_model_that_is_compiled_is_not_forked() -> None:
    assert not forks(EngineConfig(kind="vllm", vllm=VllmConfig(enforce_eager=False)))
