"""What reward functions start, print and break: nothing outlives its worker or reaches the run."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reward_pools import alive, parent_of, running, until_gone

from asyncrl.errors import RewardFailed, RewardTimeout
from asyncrl.user_code.process import _END_SECONDS
from asyncrl.user_code.supervisor import BURST_BYTES, SWITCH

SOURCE = '''
import os, signal, struct, subprocess, sys, time

def idle(pids):
    """What the children do: note who they are, and wait."""
    with open(pids, "a") as out:
        out.write(f"{os.getpid()} ")
    time.sleep(600)

def start(how, pids):
    """Leave a process behind."""
    child = os.fork()
    if child == 0:
        if how in ("setsid", "daemon"):
            os.setsid()
        if how == "daemon" and os.fork():
            os._exit(0)
        if how == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        idle(pids)
    if how == "daemon":
        os.waitpid(child, 0)
    while not (os.path.exists(pids) and open(pids).read().endswith(" ")):
        time.sleep(0.01)

def score(prompt, response, row):
    if response == "pid":
        return os.getpid()
    if response == "wait":
        open(row["began"], "w").close()
        while not os.path.exists(row["go"]):
            time.sleep(0.01)
    if response == "oom":
        return int(open("/proc/self/oom_score_adj").read())
    how, _, after = response.partition(" ")
    if how in ("fork", "setsid", "daemon", "stubborn"):
        start(how, row["pids"])
    elif how == "bomb":
        with open(row["pids"], "w") as out:
            out.write(str(os.getpid()))
        while True:
            try:
                os.fork()
            except OSError:
                pass
    elif how == "twice":
        os.fork()
    elif how == "print":
        for _ in range(2000):
            print("x" * 50_000, end="")
        print("the end", flush=True)
    if after == "exit":
        os._exit(7)
    if after.startswith("kill"):
        # As often as the row says.
        with open(row["deaths"], "a+") as file:
            file.seek(0)
            if len(file.read()) < row["times"]:
                file.write("x")
                file.flush()
                os.kill(os.getpid(), getattr(signal, after.partition("=")[2] or "SIGKILL"))
    return 1.0
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(params=[True, False], ids=["control group", "sweep"])
def control_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With control groups where the system allows them, and without."""
    if not request.param:
        monkeypatch.setenv(SWITCH, "0")


@pytest.mark.usefixtures("control_groups")
@pytest.mark.parametrize("how", ["fork", "setsid", "daemon", "stubborn"])
def test_what_a_function_has_started_dies_with_its_process(
    source: Path, tmp_path: Path, how: str
) -> None:
    async def check() -> None:
        row = {"pids": str(tmp_path / "pids")}
        async with running({"name": f"{source}:score"}, max_attempts=1) as pool:
            with pytest.raises(
                RewardFailed, match=r"ended with exit code 7, and 1 processes(.|\n)*'17'"
            ) as caught:
                await pool.score("", f"{how} exit", row, example_id="17")
            assert caught.value.reason == "died"
            (left,) = map(int, (tmp_path / "pids").read_text().split())
            assert not alive(left)
            assert (await pool.score("", "", row)).value == 1.0

    asyncio.run(check())


def test_what_a_function_leaves_behind_lives_as_long_as_its_worker(
    source: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        row = {"pids": str(tmp_path / "pids")}
        async with running({"name": f"{source}:score"}) as pool:
            assert (await pool.score("", "daemon", row)).value == 1.0
            (left,) = map(int, (tmp_path / "pids").read_text().split())
            assert alive(left)
        assert not alive(left)

    asyncio.run(check())


@pytest.mark.usefixtures("control_groups")
def test_what_a_function_has_started_dies_with_a_generator_that_is_killed(
    source: Path, tmp_path: Path
) -> None:
    program = f"""
import asyncio
from reward_pools import running
async def main():
    async with running({{"name": "{source}:score"}}) as pool:
        await pool.score("", "daemon", {{"pids": "{tmp_path}/pids"}})
        worker = await pool.score("", "pid", {{}})
        print(int(worker.value), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    path = os.pathsep.join([str(Path(__file__).parents[2] / "support"), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as generator:
        assert generator.stdout is not None
        worker = int(generator.stdout.readline())
        left = int((tmp_path / "pids").read_text())
        assert alive(worker)
        assert alive(left)
        generator.send_signal(signal.SIGKILL)
    asyncio.run(until_gone(worker))
    asyncio.run(until_gone(left))


@pytest.mark.usefixtures("control_groups")
def test_a_suspended_supervisor_ends_at_once_with_all_below_it(
    source: Path, tmp_path: Path
) -> None:
    async def check() -> float:
        row = {"pids": str(tmp_path / "pids")}
        async with running({"name": f"{source}:score"}) as pool:
            worker = int((await pool.score("", "pid", row)).value)
            assert (await pool.score("", "daemon", row)).value == 1.0
            os.kill(parent_of(worker), signal.SIGSTOP)
            began = time.monotonic()
        assert not alive(worker)
        assert not alive(int((tmp_path / "pids").read_text()))
        return time.monotonic() - began

    assert asyncio.run(check()) < _END_SECONDS / 2


def test_a_closed_pool_has_no_process_that_was_being_killed(source: Path, tmp_path: Path) -> None:
    async def check() -> None:
        row = {"began": str(tmp_path / "began"), "go": str(tmp_path / "never")}
        async with running({"name": f"{source}:score"}, timeout_seconds=2) as pool:
            worker = int((await pool.score("", "pid", row)).value)
            supervisor = parent_of(worker)
            with pytest.raises(RewardTimeout):
                await pool.score("", "wait", row)
        assert not alive(worker)
        with pytest.raises(ProcessLookupError):  # it has also been reaped
            os.kill(supervisor, 0)

    asyncio.run(check())


@pytest.mark.usefixtures("control_groups")
def test_a_fork_bomb_is_bounded(source: Path, tmp_path: Path) -> None:
    async def check() -> None:
        row = {"pids": str(tmp_path / "pids")}
        async with running({"name": f"{source}:score"}, max_processes=30) as pool:
            with pytest.raises(RewardFailed, match=r"rewards\.max_processes is 30") as caught:
                await pool.score("", "bomb", row)
            assert caught.value.reason == "too_many_processes"
            session = int((tmp_path / "pids").read_text())
            with pytest.raises(ProcessLookupError):
                os.killpg(session, 0)
            assert (await pool.score("", "", row)).value == 1.0

    asyncio.run(check())


def test_a_busy_worker_that_is_killed_is_replaced_and_its_call_repeated(
    source: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:score"}) as pool:
            row = {"deaths": str(tmp_path / "deaths"), "times": 2}
            responses = ["", " kill", "", " kill=SIGSEGV", ""]
            rewards = await asyncio.gather(*(pool.score("", one, row) for one in responses))
            assert [reward.value for reward in rewards] == [1.0] * 5
            assert (pool.counts.retried, pool.counts.failures, pool.scored) == (2, 0, 5)

    asyncio.run(check())


def test_the_kernel_kills_a_reward_function_for_memory_before_the_engine(source: Path) -> None:
    mine = int(Path("/proc/self/oom_score_adj").read_text())

    async def check() -> None:
        async with running({"name": f"{source}:score"}) as pool:
            assert (await pool.score("", "oom", {})).value > mine

    asyncio.run(check())


def test_a_worker_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    file, mark = tmp_path / "mine.py", tmp_path / "mark"
    file.write_text(
        "import os, pathlib, signal\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "starts = len(mark.read_text()) if mark.exists() else 0\n"
        "mark.write_text('x' * (starts + 1))\n"
        "if starts in (0, 2):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def score(prompt, response, example):\n"
        "    return os._exit(3) if starts == 1 else 1.0\n"
    )

    async def check() -> None:
        async with running({"name": f"{file}:score"}) as pool:
            # Its first repetition finds a process that is killed while it starts.
            assert (await pool.score("", "", {})).value == 1.0
            assert pool.counts.retried == 1

    asyncio.run(check())


def test_a_suspended_machine_makes_no_call_overdue(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        began, go = tmp_path / "began", tmp_path / "go"
        async with running({"name": f"{source}:score"}, timeout_seconds=60) as pool:
            row = {"began": str(began), "go": str(go)}
            call = asyncio.create_task(pool.score("", "wait", row))
            while not began.exists():  # noqa: ASYNC110 - another process's file
                await asyncio.sleep(0.01)
            clock = time.monotonic
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)
            for _ in range(20):  # the loop's timers are due now
                await asyncio.sleep(0.01)
            assert not call.done()
            go.touch()
            assert (await call).value == 1.0

    asyncio.run(check())


@pytest.mark.parametrize("on_error", ["stop", "zero"])
def test_a_call_whose_processes_all_die_is_that_samples_failure(
    source: Path, tmp_path: Path, on_error: str
) -> None:
    async def check() -> None:
        function = f"{source}:score"
        async with running({"name": function}, on_error=on_error, max_attempts=2) as pool:
            row = {"deaths": str(tmp_path / "deaths"), "times": 9}
            others = [pool.score("", "", row) for _ in range(3)]
            values = await asyncio.gather(
                *others, pool.score("", " kill", row, example_id="q-7"), return_exceptions=True
            )
            assert [reward.value for reward in values[:3]] == [1.0] * 3  # type: ignore[union-attr]
            if on_error == "stop":
                message = str(values[3])
                assert f"{function}': its process was killed by signal 9 (SIGKILL)" in message
                assert "'q-7' (attempt 2 of 2)" in message
            else:
                assert (values[3].value, values[3].verdict) == (0.0, "failed")  # type: ignore[union-attr]
            assert pool.counts.failed == {"score": {"died": 1}}

    asyncio.run(check())


def test_a_fork_that_returns_from_the_function_answers_nothing(source: Path) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:score"}) as pool:
            assert (await pool.score("", "twice", {})).value == 1.0
            assert (await pool.score("", "", {})).value == 1.0

    asyncio.run(check())


def test_output_is_limited_and_its_end_is_quoted(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:score"}, max_attempts=1) as pool:
            assert (await pool.score("", "print", {})).value == 1.0  # 100 MB
            with pytest.raises(RewardFailed, match=r"Its last lines:\n(.|\n)*the end"):
                await pool.score("", "print exit", {})

    with caplog.at_level(logging.INFO):
        asyncio.run(check())
    assert "bytes here: a reward worker may log" in caplog.text
    assert len(caplog.text) < 4 * BURST_BYTES
