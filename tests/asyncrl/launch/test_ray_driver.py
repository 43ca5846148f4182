"""The process that speaks to Ray, and the actor that runs an agent, without a cluster."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from asyncrl.launch.ray import actor, messages
from asyncrl.launch.ray.messages import Slot

pytest.importorskip("ray")
from ray._private.worker import listen_error_messages
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

driver_of_ray = pytest.importorskip("asyncrl.launch.ray.driver")

SERVE = messages.Serve("127.0.0.1:5", b"secret")
BROKEN, DIED = ActorUnavailableError("the connection", None), ActorDiedError()


class World:
    """What actors answer, one after the other, and what the driver says of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[messages.FromDriver] = []
        self.made = 0
        self.killed = 0
        self.answers: list[Any] = []
        self.driver = driver_of_ray.Driver.__new__(driver_of_ray.Driver)
        self.driver._say = self.said.append
        self.driver._order = SERVE
        self.driver._groups = {"generator-0": MagicMock()}
        self.driver._actors, self.driver._serving = {}, set()
        monkeypatch.setattr(self.driver, "_make", self._make)
        ray = SimpleNamespace(get=self._get, kill=self._kill)
        monkeypatch.setattr(driver_of_ray, "ray", ray)
        monkeypatch.setattr(driver_of_ray, "AGAIN_SECONDS", 0.0)

    def _make(self, *_: object) -> Any:
        self.made += 1
        return MagicMock()

    def _kill(self, _: object) -> None:
        self.killed += 1

    def _get(self, _: object) -> Any:
        answer = self.answers.pop(0)
        if not self.answers:
            self.driver._groups.clear()  # the slot is given back, and the thread ends
        if isinstance(answer, Exception):
            raise answer
        return answer

    def keep(self, *answers: Any) -> list[messages.FromDriver]:
        self.answers = list(answers)
        self.driver._keep(Slot("generator-0", 1), self.driver._groups["generator-0"])
        assert self.said.pop() == messages.Lost("generator-0", "its room was released")
        return self.said


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_an_agent_that_ends_is_told_and_started_again(world: World) -> None:
    said = world.keep(("n", "w", ""), (1, "out of memory"), ("n", "w", ""), (0, ""))
    assert [one.cause for one in said] == [
        "its agent ended with exit code 1: out of memory", "its agent ended with exit code 0: ",
    ]  # fmt: skip
    assert (world.made, world.killed) == (1, 0)


def test_an_agent_that_cannot_start_is_told_with_its_reason(world: World) -> None:
    cause = FileNotFoundError("no program python3.11")
    error = RayTaskError("serve", "Traceback: ...", cause).as_instanceof_cause()
    (lost,) = world.keep(("n", "w", ""), error, ("n", "w", ""), BROKEN)
    assert lost.cause.startswith("its agent did not start: ")
    assert "no program python3.11" in lost.cause
    assert (world.made, world.killed) == (1, 0)


def test_a_connection_to_an_actor_that_breaks_is_no_loss(world: World) -> None:
    said = world.keep(("n", "w", ""), BROKEN, BROKEN, ("n", "w", ""), BROKEN)
    assert said == []
    assert world.made == 1


@pytest.mark.parametrize("how", [BROKEN, DIED])
def test_a_worker_that_ray_restarts_is_told_with_rays_reason(world: World, how: Exception) -> None:
    (lost,) = world.keep(("n", "w", ""), how, ("n", "another", ""), BROKEN)
    assert lost.name == "generator-0"
    assert lost.cause.startswith(f"its Ray actor was lost: {type(how).__name__}")
    assert world.made == 1, "Ray restarts it"


def test_a_bundle_that_moves_has_lost_its_node(world: World) -> None:
    said = world.keep(("n", "w", ""), DIED, ("elsewhere", "another", ""), BROKEN)
    assert said[0] == messages.NodeLeft("n"), "before the loss, which is no fault then"
    assert isinstance(said[1], messages.Lost)


def test_an_actor_that_ray_does_not_restart_is_made_anew(world: World) -> None:
    (lost,) = world.keep(("n", "w", ""), DIED, DIED, ("n", "another", ""), BROKEN)
    assert lost.cause.startswith("its Ray actor was lost: ActorDiedError")
    assert (world.made, world.killed) == (2, 1)


def test_an_actor_that_cannot_be_made_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter([RayError("the head did not answer")])

    def make(*place: object) -> Any:
        for error in made:
            raise error
        return world._make(*place)

    monkeypatch.setattr(world.driver, "_make", make)
    (lost,) = world.keep(("n", "w", ""), BROKEN)
    assert isinstance(lost, messages.Lost)
    assert (world.made, world.killed) == (1, 0)


def test_room_that_is_reserved_again_at_once_keeps_its_new_agent(world: World) -> None:
    world.driver._groups["generator-0"] = "another group"
    world.driver._keep(Slot("generator-0", 1), "the released group")
    assert world.said == []


def test_a_node_that_does_not_reach_the_controller_says_so(world: World) -> None:
    (lost,) = world.keep(("n", "w", "timed out"), BROKEN)
    assert "cannot reach this machine at 127.0.0.1:5: timed out. Open the firewall" in lost.cause


def test_a_joiner_without_room_is_told_so_and_takes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = MagicMock()
    group.wait.return_value = False
    removed: list[Any] = []
    monkeypatch.setattr(driver_of_ray, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(driver_of_ray, "remove_placement_group", removed.append)
    monkeypatch.setattr(driver_of_ray, "_free", lambda: "CPU 0")
    driver_of_ray.ray.cluster_resources = lambda: {"CPU": 4.0}
    nodes: list[Any] = [{"Alive": True, "Resources": {"CPU": 4.0}}]
    driver_of_ray.ray.nodes = lambda: nodes
    world.driver._join(Slot("generator-1", 1), 6.0)
    nodes.clear()
    world.driver._join(Slot("generator-2", 1), 6.0)
    first, second = world.said
    assert first.reason.startswith("generator-1 needs {'CPU': 1}, and the Ray cluster did")
    assert "did not provide it within 6 s; free are CPU 0" in first.reason
    assert "the Ray cluster has 0 CPU in all" in second.reason
    assert removed == [group]
    assert list(world.driver._groups) == ["generator-0"]


def test_orders_of_a_controller_that_is_gone_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe is closed by the kernel if it is killed."""
    monkeypatch.setattr(driver_of_ray.threading, "Timer", MagicMock())
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    driver_of_ray._read([messages.line(messages.GiveBack("a"))], orders)
    assert [orders.get(), orders.get()] == [messages.GiveBack("a"), None]


def _silent() -> bool:
    raise ConnectionError


@pytest.mark.parametrize(
    ("ask", "said", "all_too"),
    [
        (_silent, "the Ray head at h:1 has not answered for 0 s", False),
        (lambda: False, "this machine's node has left the Ray cluster at h:1", True),
    ],
)
def test_a_silent_head_and_a_node_that_has_left_are_told(
    ask: Callable[[], bool], said: str, *, all_too: bool
) -> None:
    reason, agents_too = driver_of_ray.watch(ask, "h:1", seconds=0.3)
    assert reason.startswith(said)
    assert agents_too == all_too


@pytest.mark.parametrize("answers", [[], ["a message"], ["one", "another"]])
def test_rays_thread_of_messages_rests_when_the_head_has_none(answers: list[str]) -> None:
    """It asks again at once, and a head that is gone has none at once, so it took a whole core."""
    done: list[str] = []
    left = list(answers)

    def poll() -> tuple[None, dict[str, Any] | None]:
        done.append("asked")
        message = {"job_id": b"of another run", "error_message": left.pop(0)} if left else None
        return None, message

    ends = SimpleNamespace(is_set=lambda: len(done) > 8, wait=lambda _seconds: done.append("rest"))
    worker = SimpleNamespace(
        threads_stopped=ends,
        current_job_id=SimpleNamespace(binary=lambda: b"of this run"),
        gcs_error_subscriber=SimpleNamespace(subscribe=list, close=list, poll=poll),
    )
    worker.gcs_error_subscriber = driver_of_ray.UnhurriedMessages(worker)
    listen_error_messages(worker, ends)
    assert left == []
    assert done[: len(answers)] == ["asked"] * len(answers), "messages are taken at once"
    rest = done[len(answers) :]
    assert rest == ["asked", "rest"] * (len(rest) // 2)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("foo", "is not HOST:PORT, auto or null"),
        ("ray://127.0.0.1:10001", "Ray's client .* is not used"),
        ("no.such.host.invalid:6379", "nothing listens at no.such.host.invalid:6379"),
        ("127.0.0.1:1", "nothing listens at 127.0.0.1:1"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused_by_name(address: str, said: str) -> None:
    with pytest.raises(driver_of_ray.ClusterRefused, match=said):
        driver_of_ray.check_port(address)


def test_a_misspelt_runtime_environment_is_refused() -> None:
    driver_of_ray.check_runtime_env({"env_vars": {"A": "b"}, "pip": ["x"]})
    with pytest.raises(
        driver_of_ray.ClusterRefused, match=r"does not know env_var; it knows .*pip"
    ):
        driver_of_ray.check_runtime_env({"env_var": {"A": "b"}})


AGENT = """
import json, os, sys, time
sys.argv.pop(1)
print(json.dumps([sys.argv[1:], sys.stdin.read(), os.environ["CUDA_VISIBLE_DEVICES"],
                  os.environ["ASYNCRL_AGENT_NODE"]]), flush=True)
time.sleep(float(sys.argv[-1]))
sys.exit(3)
"""


@pytest.fixture
def in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(
        get_node_id=lambda: "n1", get_accelerator_ids=lambda: {"GPU": ["4", "6"]}
    )
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)


@pytest.mark.usefixtures("in_a_worker")
def test_an_agent_gets_what_its_bundle_has_and_its_secret_is_on_no_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actor, "_AGENT", AGENT)
    made = actor.AgentActor()
    code, words = made.serve(["--role", "0"], b"\x01" * 32)
    assert code == 3
    assert words == (
        f'[["agent", "--key-file", "/dev/stdin", "--role", "0"], "{"01" * 32}", "4,6", "n1"]'
    )


@pytest.mark.usefixtures("in_a_worker")
def test_a_second_call_waits_for_the_agent_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's connection may have broken."""
    monkeypatch.setattr(actor, "_AGENT", AGENT)
    made = actor.AgentActor()
    codes: list[int] = []

    def serve() -> None:
        codes.append(made.serve(["600"], b"s")[0])

    calls = [threading.Thread(target=serve) for _ in range(2)]
    for call in calls:
        call.start()
    until = time.monotonic() + 60
    while not made._said:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert made._agent is not None
    os.kill(made._agent.pid, signal.SIGKILL)
    for call in calls:
        call.join(60)
    assert codes == [-9, -9]


def test_a_killed_worker_takes_its_agent_along(tmp_path: Path) -> None:
    """Which the kernel does, whatever it is doing."""
    script = (
        "import sys; from asyncrl.launch.ray import actor; from types import SimpleNamespace as N\n"
        "sys.modules['ray'] = N(get_runtime_context=lambda: N(get_node_id=lambda: 'n', "
        "get_accelerator_ids=dict))\n"
        "made = actor.AgentActor()\n"
        "made.serve(['--controller', '127.0.0.1:1', '--role', 'any'], bytes(32))\n"
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        worker = subprocess.Popen([sys.executable, "-c", script], stdout=output)
    until = time.monotonic() + 60
    while "for a controller at 127.0.0.1:1" not in log.read_text():
        assert time.monotonic() < until
        assert worker.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    (agent,) = map(int, children)
    worker.kill()
    worker.wait()
    while Path(f"/proc/{agent}/exe").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_port_that_is_open_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert actor.cannot_reach(f"127.0.0.1:{listener.getsockname()[1]}") == ""
    assert "refused" in actor.cannot_reach("127.0.0.1:1")
