from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_processes import generator, run_config, started_fleet

from asyncrl.config.run_config import RunConfig
from asyncrl.controller.watchdog import Watchdog
from asyncrl.errors import RunFailed
from asyncrl.wire.messages import to_generator, to_trainer

CONFIG = run_config(launcher={"generators": 2, "max_restarts": 1})


def test_every_process_has_an_index_of_its_own() -> None:
    fleet, hub = started_fleet(CONFIG)
    specs = [handle.spec for handle in hub.launcher.handles.values()]
    assert [(s.name, s.role, s.process_index) for s in specs] == [
        ("trainer", "trainer", 1), ("generator-0", "generator", 2), ("generator-1", "generator", 3),
    ]  # fmt: skip
    replacement = fleet.restart(generator(fleet))
    assert replacement == "generator-0.1"
    spec = hub.launcher.handles[replacement].spec
    assert (spec.process_index, spec.first) == (4, False)
    assert fleet.restart(generator(fleet)) is None, "launcher.max_restarts is 1"
    fleet.is_taken = lambda index: index in (5, 6)
    assert hub.launcher.handles[fleet.join(2)].spec.process_index == 7, "its port is free"


def test_a_death_is_reported_once_with_its_cause() -> None:
    fleet, hub = started_fleet(CONFIG)
    worker = generator(fleet)
    assert fleet.deaths() == []
    worker.reason = "out of memory"
    hub.launcher.handles["generator-0"].code = -9
    assert fleet.deaths() == [(worker, "was killed by SIGKILL: out of memory")]
    assert fleet.deaths() == []
    assert worker.state == "lost"


def test_a_silent_process_is_killed() -> None:
    fleet, hub = started_fleet(CONFIG)
    worker = generator(fleet)
    worker.heard -= CONFIG.launcher.silence_seconds + 1
    [(lost, reason)] = fleet.deaths()
    assert lost is worker
    assert reason == "sent nothing for 121 s (launcher.silence_seconds) and was killed"
    assert hub.launcher.handles["generator-0"].ended == ["kill"]


def test_a_start_that_takes_too_long_names_the_setting_and_what_the_process_did_last() -> None:
    fleet, hub = started_fleet(CONFIG)
    worker = generator(fleet)
    worker.is_ready, hub.launcher.handles["generator-0"].log = False, "Loading shard 11 of 30"
    assert fleet.what_starts().startswith("generator-0 (its log ends with: Loading shard 11 of 30)")
    worker.heard -= CONFIG.launcher.startup_seconds - 1
    assert fleet.deaths() == []
    worker.heard -= 2
    [(_, reason)] = fleet.deaths()
    assert reason == (
        "was not ready after 1801 s (launcher.startup_seconds) and was killed; its log ends with: "
        "Loading shard 11 of 30"
    )


def test_time_in_which_the_controller_was_suspended_is_nobodys_silence() -> None:
    """SIGSTOP for eight seconds, with silence_seconds 5 and two seconds of silence before it."""
    fleet, _ = started_fleet(run_config(launcher={"generators": 2, "silence_seconds": 5}))
    for worker in fleet.everyone():
        worker.heard -= 10
    fleet._last_check -= 8
    assert fleet.deaths() == []
    generator(fleet).heard -= 5
    assert [worker.name for worker, _ in fleet.deaths()] == ["generator-0"]


def test_after_kill_all_no_death_is_reported_and_nothing_is_sent() -> None:
    fleet, hub = started_fleet(CONFIG)
    fleet.kill_all()
    assert fleet.deaths() == []
    asyncio.run(fleet.shut_down())
    assert hub.sent == []
    assert all(handle.ended == ["kill"] for handle in hub.launcher.handles.values())


def test_a_process_that_sends_nonsense_is_killed_and_reported() -> None:
    fleet, hub = started_fleet(CONFIG)
    worker = generator(fleet)
    fleet.cut_off("generator-0", "sent 101 frames that were refused")
    fleet.cut_off("nobody", "a name that an outsider made up")
    assert hub.launcher.handles["generator-0"].ended == ["kill"]
    assert fleet.deaths() == [(worker, "was killed by SIGKILL: sent 101 frames that were refused")]


def test_shutting_down_ends_every_process() -> None:
    fleet, hub = started_fleet(CONFIG)
    generator(fleet, 1).is_ready = False  # it cannot receive messages yet
    asyncio.run(fleet.shut_down())
    assert hub.sent == [
        ("trainer", to_trainer.Shutdown(checkpoint=True)),
        ("generator-0", to_generator.Shutdown()),
    ]
    assert hub.launcher.handles["generator-1"].ended == ["term"]
    assert all(handle.code is not None for handle in hub.launcher.handles.values())


class Deaths:
    """A watchdog whose training and progress only take notes."""

    def __init__(self, config: RunConfig = CONFIG) -> None:
        self.fleet, self.hub = started_fleet(config)
        self.events: list[object] = []
        self.said: list[str] = []
        notes: Any = self
        self.watchdog = Watchdog(self.fleet, notes, notes, notes, notes)

    is_held, verifies = False, True

    async def apply(self, event: object) -> None:
        self.events.append(event)

    async def lost(self, worker: object) -> None:
        """Nothing is evaluated."""

    def say(self, text: str) -> None:
        self.said.append(text)

    def died(self, role: str, name: str) -> None:
        self.said.append(role)

    def kill(self, name: str, code: int = -9) -> bool:
        self.hub.launcher.handles[name].code = code
        return asyncio.run(self.watchdog.check())


def test_the_watchdog_replaces_a_generator() -> None:
    run = Deaths()
    assert not asyncio.run(run.watchdog.check())
    assert run.kill("generator-1")
    assert [type(event).__name__ for event in run.events] == ["GeneratorLost"]
    assert run.said == [
        "generator-1 was killed by SIGKILL\nthe log of generator-1",
        "generator",
        "started generator-1.1 in place of generator-1",
    ]


def test_generators_that_are_lost_with_their_machines_count_against_no_limit() -> None:
    run = Deaths(run_config(launcher={"generators": 2, "max_restarts": 0}))
    name = "generator-1"
    for number in range(1, 6):
        run.hub.launcher.handles[name].lost_with_machine = True
        assert run.kill(name, code=143 if number == 3 else -9)
        name = f"generator-1.{number}"
        assert run.said[-1].startswith(f"started {name} in place of generator-1")
    run.kill(name)
    assert len(run.fleet.ordered) == 1, "this was its own fault, and none may be replaced"


def test_lines_of_the_log_that_the_reason_quotes_are_not_repeated() -> None:
    run = Deaths()
    run.fleet.cut_off("generator-1", "the engine failed; its log:\nno memory")
    run.hub.launcher.handles["generator-1"].log = "started\nno memory"
    assert run.kill("generator-1")
    assert run.said[0].splitlines() == [
        *("generator-1 was killed by SIGKILL: the engine failed; its log:", "no memory"),
        "started",
    ]


def test_a_run_ends_with_its_last_generator() -> None:
    run = Deaths()
    run.kill("generator-0")  # replaced
    run.kill("generator-1")  # not replaced, but another is left
    with pytest.raises(RunFailed, match=r"no generator is left and launcher.max_restarts \(1\)"):
        run.kill("generator-0.1")


def test_a_run_whose_generators_all_fail_before_they_are_ready_ends() -> None:
    run = Deaths(run_config(launcher={"generators": 2, "max_restarts": 9}))
    for worker in run.fleet.every_generator:
        worker.is_ready = False
    run.kill("generator-0", code=1)  # one bad device among many: replaced
    run.kill("generator-0.1", code=-9)  # not its own fault: replaced
    with pytest.raises(RunFailed, match=r"generator-1 ended with exit code 1; no generator has"):
        run.kill("generator-1", code=1)


def test_a_message_to_a_dead_process_is_dropped() -> None:
    fleet, hub = started_fleet(CONFIG)
    hub.launcher.handles["generator-0"].code = 1
    asyncio.run(fleet.send("generator-0", to_generator.Pause()))
    assert hub.sent == []
