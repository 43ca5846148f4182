"""The pool with real processes: functions that hang, raise, crash, print or return nonsense."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reward_pools import running, until_gone

from asyncrl.errors import RewardError, RewardFailed, RewardTimeout
from asyncrl.rewards.calls import Reward
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.protocol import Began, Call, Scored
from asyncrl.user_code.streams import pack

SOURCE = '''
import os, subprocess, sys, time

def by_response(prompt, response, example, scale=1.0):
    """The response says what to do."""
    if response == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(example["pids"], "w") as out:
            out.write(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    if response == "raise":
        raise KeyError("the user's own mistake")
    if response == "exit":
        sys.exit(3)
    if response == "crash":
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    if response == "print":
        print("this is no frame", flush=True)
        sys.stdin.read()
    if response.startswith("forge "):
        frame = bytes.fromhex(response.split()[1])
        for descriptor in range(3, 32):
            try:
                os.write(descriptor, len(frame).to_bytes(4, "little") + frame)
            except OSError:
                pass
    if response == "pid":
        return os.getpid()
    if response == "columns":
        assert (example["prompt"], example["answer"]) == ("what?", "7")
        assert example["row"] == {"prompt": "WHAT?", "answer": 7, "row": [1]}
        return 1.0
    special = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "true": True}
    return special[response] if response in special else scale * len(response)

def by_row(prompt, response, row):
    assert row == {"prompt": "WHAT?", "answer": 7, "row": [1]}, row
    row["answer"] = None
    return 2.0
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def test_the_sum_is_weighted(source: Path) -> None:
    async def check() -> None:
        functions = (
            {"name": "arithmetic"},
            {"name": "format", "weight": 0.5, "args": {"pattern": r"[\d+=:,]+"}},
            {"name": f"{source}:by_response", "weight": -0.25, "args": {"scale": 2.0}},
        )
        async with running(*functions) as pool:
            assert (
                await pool.score("1+2=?", "1+2=3:3", {"answer": "3"})
            ).value == 1.0 + 0.5 - 0.25 * 14
            assert (await pool.score("1+2=?", "x:3", {"answer": "3"})).value == 1.0 - 0.25 * 6
            assert (pool.scored, pool.counts.failures, pool.waiting, pool.running) == (2, 0, 0, 0)

    asyncio.run(check())


def test_a_module_of_the_working_directory(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with running({"name": "my_rewards:by_response"}) as pool:
            assert (await pool.score("", "four", {})).value == 4.0

    monkeypatch.chdir(source.parent)
    asyncio.run(check())


def test_the_users_own_columns_arrive_unchanged(source: Path) -> None:
    async def check() -> None:
        names = (f"{source}:by_row", f"{source}:by_response")
        async with running(*({"name": name} for name in names)) as pool:
            row = {"prompt": "WHAT?", "answer": 7, "row": [1]}
            example = {"prompt": "what?", "answer": "7", "row": row}
            assert (await pool.score("what?", "columns", example)).value == 3.0

    asyncio.run(check())


def test_a_hanging_reward_is_killed_with_its_children_and_replaced(
    source: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        # Long enough for a loaded machine to reach the user's code, which then never returns.
        async with running(
            {"name": "arithmetic"}, {"name": f"{source}:by_response"}, timeout_seconds=3
        ) as pool:
            example = {"answer": "1", "pids": str(tmp_path / "pids")}
            with pytest.raises(
                RewardTimeout, match=r"by_response' did not return within 3 s.*hang"
            ):
                await pool.score("", "hang", example)
            for pid in (tmp_path / "pids").read_text().split():
                await until_gone(int(pid))
            assert (await pool.score("", "ok", example)).value == 2.0
            assert (pool.counts.failures, pool.scored) == (1, 1)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", r"by_response' failed for the response 'raise':(.|\n)*the user's own mistake"),
        ("exit", r"SystemExit: 3"),
        ("nan", r"must return a finite number, got nan"),
        ("inf", r"must return a finite number, got inf"),
        ("none", r"returned None, which means"),
        ("text", r"must return a number, got str"),
        ("crash", r"ended with exit code 7. Its last lines:\nlast words"),
    ],
)
def test_failures_name_the_function_and_the_reason(
    source: Path, response: str, message: str
) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}) as pool:
            with pytest.raises(RewardFailed, match=message) as caught:
                await pool.score("", response, {})
            assert caught.value.exit_code == 2
            assert (await pool.score("", "ok", {})).value == 2.0
            assert (await pool.score("", "true", {})).value == 1.0

    asyncio.run(check())


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\x81\xa4type\xa3\xff\xff\xff", "not_text"),
        (b"\x82\xa4type\xa5Ready\xa1x" + b"\x91" * 20_000, "too_deep"),
        (b"\x00", "unexpected"),
        (b"\x90", "unexpected"),
        (b"\x82", "malformed"),
        (msgspec.msgpack.encode(Began(0, 99)), "there is no function 99"),
        (msgspec.msgpack.encode(Scored(0, float("nan"), (0.0,), 0.0)), "a reward of nan"),
        (msgspec.msgpack.encode(Scored(7, 1.0, (1.0,), 0.0)), "a call that it does not have"),
    ],
)
def test_a_worker_that_writes_other_frames_fails_its_call_only(
    source: Path, frame: bytes, reason: str
) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}, max_attempts=1) as pool:
            with pytest.raises(RewardFailed, match=f"not a valid answer .*{reason}.* was killed"):
                await pool.score("", f"forge {frame.hex()}", {})
            assert (await pool.score("", "ok", {})).value == 2.0

    asyncio.run(check())


def test_what_the_function_prints_or_reads_does_not_disturb(source: Path) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}) as pool:
            assert (await pool.score("", "print", {})).value == 5.0

    asyncio.run(check())


def test_on_error_zero_counts_and_continues(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}, on_error="zero") as pool:
            assert (await pool.score("", "raise", {})).value == 0.0
            assert (pool.counts.failures, pool.scored) == (1, 0)

    asyncio.run(check())
    assert "counted as 0" in caplog.text


def test_calls_are_bounded_by_the_workers(source: Path) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}, workers=2) as pool:
            calls = [asyncio.create_task(pool.score("", "pid", {})) for _ in range(20)]
            while not pool.running:  # noqa: ASYNC110 - the pool's own state
                await asyncio.sleep(0)
            assert pool.running + pool.waiting == 20
            pids = {reward.value for reward in await asyncio.gather(*calls)}
            assert len(pids) == 2
            assert os.getpid() not in pids

    asyncio.run(check())


def test_what_waits_behind_a_call_that_hangs_is_scored_by_the_next_process(
    source: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}, timeout_seconds=3) as pool:
            assert (
                await pool.score("", "quick", {})
            ).value == 5.0  # so that many calls are sent at once
            example = {"pids": str(tmp_path / "pids")}
            responses = ["x", "xx", "hang", "xxxx", "xxxxx"]
            calls = [pool.score("", response, example) for response in responses]
            values = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(values[2], RewardTimeout)
            scored = [one.value for one in values if isinstance(one, Reward)]
            assert scored == [1, 2, 4, 5]
            assert (pool.running, pool.waiting, pool.scored, pool.counts.failures) == (0, 0, 5, 1)

    asyncio.run(check())


def test_calls_in_progress_fail_when_the_pool_is_closed(source: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}) as pool:
            example = {"pids": str(tmp_path / "pids")}
            calls = [asyncio.create_task(pool.score("", "hang", example)) for _ in range(3)]
            while not pool.longest[1]:  # noqa: ASYNC110 - the pool's own state
                await asyncio.sleep(0)
            assert pool.longest[0] == "by_response"
        for failed in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failed, RewardError)
            assert "not running" in str(failed)

    asyncio.run(check())


def test_a_cancelled_call_does_not_answer_the_next_one(source: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}, timeout_seconds=60) as pool:
            example = {"pids": str(tmp_path / "pids")}
            call = asyncio.create_task(pool.score("", "hang", example))
            async with asyncio.timeout(60):
                while not (tmp_path / "pids").exists():  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await pool.score("", "ok", {})).value == 2.0

    asyncio.run(check())


def test_a_call_behind_a_cancelled_one_is_not_overdue_while_the_process_is_killed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}, timeout_seconds=60) as pool:
            [lane] = pool._lanes
            lane._limit = 64  # as after quick calls, and "first" is one on a busy machine, too
            monkeypatch.setattr("asyncrl.rewards.pool._QUICK_SECONDS", 60.0)
            example = {"pids": str(tmp_path / "pids")}
            texts = ["first", "hang", "ok", "ok"]
            calls = [asyncio.create_task(pool.score("", text, example)) for text in texts]
            async with asyncio.timeout(60):
                while not (lane.due and len(lane.sent) == 3):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
            monkeypatch.setattr(lane.process, "terminate", lambda: None)  # it takes its time
            calls[1].cancel()
            await asyncio.wait([calls[1]])
            lane._give_up_overdue()
            assert not lane.sent
            await asyncio.sleep(0)
            assert not calls[2].done()
            monkeypatch.undo()
            lane.process.terminate()
            assert [(await call).value for call in calls[2:]] == [2.0, 2.0]

    asyncio.run(check())


def test_a_lane_that_cannot_start_a_process_leaves_its_calls_to_the_others(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:by_response"}, workers=2) as pool:
            broken, _ = pool._lanes

            async def start() -> None:
                raise RewardError("no memory")

            monkeypatch.setattr(broken, "start", start)
            call = asyncio.create_task(pool.score("", "hang", {"pids": os.devnull}))
            async with asyncio.timeout(60):
                while not broken.due:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
                [sent] = broken.sent.values()
                sent.frame = pack(Call(sent.number, "", "ok", {}))
                broken.process.terminate()
                assert (await call).value == 2.0

    asyncio.run(check())


def test_waiting_calls_fail_together_while_no_process_can_be_started(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []

    async def check() -> None:
        async with running({"name": f"{source}:by_response"}, on_error="zero") as pool:
            (lane,) = pool._lanes

            async def start() -> None:
                starts.append(len(pool._queue.waiting))
                raise RewardError("no memory")

            monkeypatch.setattr(lane, "start", start)
            lane.process.terminate()
            async with asyncio.timeout(60):
                while not starts:  # noqa: ASYNC110 - the process ends first
                    await asyncio.sleep(0.01)
                rewards = await asyncio.gather(*(pool.score("", "ok", {}) for _ in range(9)))
            assert {one.verdict for one in rewards} == {"unscored"}
            assert pool.counts.failed == {"by_response": {"not_loaded": 9}}

    asyncio.run(check())
    assert starts == [0, 9]  # one start for all nine


def test_start_refuses_what_cannot_be_loaded(source: Path) -> None:
    def refused(name: str, **values: Any) -> str:
        async def check() -> str:
            with pytest.raises(RewardError) as caught:
                async with running({"name": name}, **values):
                    pass
            return str(caught.value)

        return asyncio.run(check())

    assert "Did you mean 'arithmetic'" in refused("aritmetic")
    assert "Did you mean 'by_response'" in refused(f"{source}:by_respons")
    source.write_text("1 / 0\n")
    assert "ZeroDivisionError" in refused(f"{source}:f", workers=2)
    source.write_text("import os; os._exit(9)\n")
    assert "ended with exit code 9" in refused(f"{source}:f")
    source.write_text("import time; time.sleep(600)\n")
    assert "rewards.startup_seconds" in refused(f"{source}:f", startup_seconds=1)


def test_a_pool_that_is_not_running_says_so() -> None:
    async def check() -> None:
        pool = RewardPool(RewardConfig())
        with pytest.raises(RewardError, match="not running"):
            await pool.score("", "", {})
        await pool.start()
        await pool.close()
        await pool.close()
        with pytest.raises(RewardError, match="not running"):
            await pool.score("", "", {})

    asyncio.run(check())
