"""Sinks of a run that fail, end or hang: the run continues and says so once."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
import pytest
from step_records import full_step

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.records import ProcessRecords
from asyncrl.monitoring.sinks import config as sink_config
from asyncrl.runs import sinks as module
from asyncrl.runs.sinks import Sinks
from asyncrl.startup.preflight import check_machine

HANGS = "import time; print('connecting', flush=True); time.sleep(1000)"
FAILS = "import sys; print('no such project', flush=True); sys.exit(5)"
WAITS = "import sys; sys.stdin.read()"


def a_run(path: Path, seconds: float = 0.5) -> RunConfig:
    (path / "logs").mkdir()
    (path / "metrics.jsonl").write_bytes(msgspec.json.encode(full_step()) + b"\n")
    monitoring = {"sinks": ["tensorboard"], "sink_seconds": seconds}
    return RunConfig.model_validate({"monitoring": monitoring})


def opened(config: RunConfig, path: Path, said: list[str], program: str) -> Sinks:
    records = ProcessRecords(path)
    return Sinks(config, path, records, said.append, (sys.executable, "-c", program))


async def until_said(said: list[str]) -> None:
    async with asyncio.timeout(60):
        while not said:  # noqa: ASYNC110 - the sinks poll
            await asyncio.sleep(0.02)


def test_a_sink_that_ends_is_reported_once_with_its_last_words(tmp_path: Path) -> None:
    async def check() -> None:
        said: list[str] = []
        sinks = opened(a_run(tmp_path), tmp_path, said, FAILS)
        await until_said(said)
        await sinks.close()
        [sentence] = said
        assert "the sink tensorboard ended with exit code 5: no such project" in sentence
        assert f"python -m asyncrl.monitoring.sinks {tmp_path} tensorboard --once" in sentence

    asyncio.run(check())


def test_a_sink_that_hangs_is_reported_and_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEHIND_SECONDS", 0.0)

    async def check() -> None:
        said: list[str] = []
        sinks = opened(a_run(tmp_path), tmp_path, said, HANGS)
        await until_said(said)
        assert "has sent nothing for" in said[0]
        began = time.monotonic()
        await sinks.close()
        assert time.monotonic() - began < 60
        assert len(said) == 1

    asyncio.run(check())


def test_a_sink_that_has_sent_everything_is_not_mentioned(tmp_path: Path) -> None:
    async def check() -> None:
        said: list[str] = []
        sinks = opened(a_run(tmp_path, seconds=100.0), tmp_path, said, WAITS)
        await sinks.close()
        assert said == []
        await sinks.close()

    asyncio.run(check())


def test_a_sink_whose_package_is_missing_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_config.importlib.util, "find_spec", lambda _name: None)
    config = RunConfig.model_validate({"monitoring": {"sinks": ["wandb"]}})
    with pytest.raises(UserError, match=r"pip install 'asyncrl\[wandb\]'"):
        check_machine(config)


def test_wandb_without_a_key_is_refused_unless_it_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    online = RunConfig.model_validate({"monitoring": {"sinks": ["wandb"]}})
    offline = [{"kind": "wandb", "offline": True}]
    with pytest.raises(UserError, match=r"key for api\.wandb\.ai is missing: set WANDB_API_KEY"):
        check_machine(online)
    check_machine(RunConfig.model_validate({"monitoring": {"sinks": offline}}))
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    check_machine(online)
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    check_machine(online)
