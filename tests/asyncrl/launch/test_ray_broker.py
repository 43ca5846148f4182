"""The broker's orders to its actors, without a cluster."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from fake_broker import NODE

from asyncrl.launch.ray import messages
from asyncrl.launch.ray import node_losses as losses
from asyncrl.launch.ray.head import watch
from asyncrl.launch.ray.nodes import Slot

pytest.importorskip("ray")
from ray.exceptions import ActorDiedError, ActorUnavailableError

broker_of_ray = pytest.importorskip("asyncrl.launch.ray.broker")
cluster_of_ray = pytest.importorskip("asyncrl.launch.ray.cluster")


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(broker_of_ray, "Cluster", MagicMock())
    question = json.dumps({"run_directory": str(tmp_path), "model": str(tmp_path)})
    asked = messages.Open(None, (Slot("trainer", 1),), "pack", "{}", question, 1, 1)
    made = broker_of_ray.Broker(asked, io.BytesIO())
    made._nodes = {0: NODE}
    made._cluster.actors = {0: MagicMock()}
    monkeypatch.setattr(made, "_refusal", lambda _nodes: None)
    monkeypatch.setattr(broker_of_ray, "ray", SimpleNamespace(get=lambda answer: answer))
    made._start(messages.Start(0, "trainer", "{}", b""))
    return made


def said(broker: Any) -> list[Any]:
    broker._output.seek(0)
    return list(messages.read_all(broker._output, messages.FROM_BROKER))


DESCRIBED = json.dumps({name: getattr(NODE, name) for name in NODE.__struct_fields__})


def test_what_ends_before_it_was_started_is_not_started(broker: Any) -> None:
    broker._end(messages.End("trainer", by_force=False))
    broker._answered("trainer", "describe", DESCRIBED)
    broker._cluster.actors[0].start.remote.assert_not_called()
    assert [status.code for status in said(broker)] == [-15]


def test_what_ends_while_it_is_started_is_ended_once_it_is(broker: Any) -> None:
    actor = broker._cluster.actors[0]
    broker._answered("trainer", "describe", DESCRIBED)
    broker._end(messages.End("trainer", by_force=False))
    actor.end.remote.reset_mock()  # there was no child yet
    broker._answered("trainer", "start", "/log")
    actor.end.remote.assert_called_once_with(False)
    assert said(broker) == [messages.Status("trainer", None, "", "", "/log", NODE)]


def test_a_process_without_a_slot_is_started_on_its_node_and_its_actor_ends_with_it(
    broker: Any,
) -> None:
    broker._start(messages.Start(None, "relay-0", "{}", b"", "b2"))
    broker._cluster.create_on.assert_called_once_with("b2", "relay-0")
    broker._answered("relay-0", "describe", DESCRIBED)
    broker._answered("relay-0", "start", "/relay")
    broker._answered("relay-0", "watch", (3, "the end"))
    broker._cluster.drop.assert_called_once_with("relay-0")
    assert said(broker)[-1] == messages.Status("relay-0", 3, "", "the end", "/relay", NODE)


def test_a_connection_to_an_actor_that_breaks_is_no_loss(broker: Any) -> None:
    broken, died = ActorUnavailableError("the connection", None), ActorDiedError()

    def answer(reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    broker_of_ray.ray.get = answer
    asked = broker._cluster.actors[0].describe.remote
    asked.reset_mock()
    broker._answered("trainer", "describe", broken)
    broker._running["trainer"].begin_by = None
    broker._keep_time(time.monotonic() + 10)
    asked.assert_called_once()
    broker._answered("trainer", "start", "/log")
    broker._cluster.actors[0].watch.remote.reset_mock()
    broker._answered("trainer", "watch", broken)
    broker._keep_time(time.monotonic())
    broker._cluster.actors[0].watch.remote.assert_not_called()
    broker._keep_time(time.monotonic() + 10)
    broker._cluster.actors[0].watch.remote.assert_called_once()
    assert [status.code for status in said(broker)] == [None]
    broker._answered("trainer", "watch", died)
    broker._keep_time(time.monotonic() + losses.LONGEST_SECONDS + 1)
    assert [status.code for status in said(broker)] == [None, -9]


GONE: dict[str, Any] = {"NodeID": NODE.id, "Alive": False}
OTHER: dict[str, Any] = {"NodeID": "another", "Alive": True}


@pytest.fixture
def runs(broker: Any) -> Any:
    """The broker, with a trainer that runs on its node, and what actors answer."""

    def answer(reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    broker_of_ray.ray.get = answer
    broker._answered("trainer", "describe", DESCRIBED)
    broker._answered("trainer", "start", "/log")
    return broker


@pytest.mark.parametrize("ended", [ActorDiedError(), (143, "the end")])
def test_what_ends_with_its_node_is_told_so_once_the_head_knows(runs: Any, ended: Any) -> None:
    now = time.monotonic()
    runs._losses.note(now - 1, [])  # older than the end: says nothing of it
    runs._answered("trainer", "watch", ended)
    runs._keep_time(now + losses.NODE_SECONDS + 1)
    assert said(runs)[1:] == []
    runs._losses.note(now + 60, [GONE, OTHER])
    runs._keep_time(now + 0.1)
    (status,) = said(runs)[1:]
    assert status.node_lost
    assert status.cause.startswith("its node left the Ray cluster")
    assert not runs._running


@pytest.mark.parametrize("ended", [ActorDiedError(), (143, "the end")])
def test_what_ends_on_a_living_node_has_itself_to_blame(runs: Any, ended: Any) -> None:
    now = time.monotonic()
    runs._answered("trainer", "watch", ended)
    runs._losses.note(now + 60, [GONE | {"Alive": True}, OTHER])
    runs._keep_time(now + losses.NODE_SECONDS / 2)
    assert said(runs)[1:] == [], "the head may hear of its node later"
    runs._keep_time(now + losses.NODE_SECONDS + 1)
    (status,) = said(runs)[1:]
    assert not status.node_lost
    assert not runs._running


def test_nothing_is_held_when_no_head_can_tell(runs: Any) -> None:
    runs._answered("trainer", "watch", (0, "the end"))
    runs._keep_time(time.monotonic())
    assert said(runs)[1:] == []
    runs._head_is_lost = True
    runs._keep_time(time.monotonic())
    (status,) = said(runs)[1:]
    assert (status.code, status.node_lost) == (0, False)
    assert not runs._running


def test_an_error_is_told_at_once_and_so_is_an_end_that_was_asked_for(runs: Any) -> None:
    runs._answered("trainer", "watch", (1, "the end"))
    runs._start(messages.Start(0, "trainer.1", "{}", b""))
    runs._answered("trainer.1", "describe", DESCRIBED)
    runs._answered("trainer.1", "start", "/log")
    runs._answered("trainer.1", "watch", (143, "held"))
    runs._end(messages.End("trainer.1", by_force=True))
    ends = [one for one in said(runs) if one.code is not None]
    assert [(one.code, one.node_lost) for one in ends] == [(1, False), (143, False)]
    runs._losses.note(time.monotonic() + 60, [])
    runs._keep_time(time.monotonic() + 60)
    assert len([one for one in said(runs) if one.code is not None]) == 2, "told once"


def test_a_process_that_no_node_has_room_for_is_given_up_with_the_reason(broker: Any) -> None:
    broker_of_ray.ray.kill = MagicMock()
    broker._keep_time(time.monotonic())
    assert said(broker) == []
    broker._keep_time(time.monotonic() + 2)  # place_seconds are 1
    assert "was not started within 1 s (launcher.ray.place_seconds)" in said(broker)[0].cause
    assert said(broker)[0].node_lost, "it had no node"
    broker_of_ray.ray.kill.assert_called_once_with(broker._cluster.actors[0])
    assert not broker._calls


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
    lost: list[tuple[str, bool]] = []
    watch(ask, "h:1", lambda why, processes: lost.append((why, processes)), seconds=0.3)
    assert len(lost) == 1
    assert lost[0][0].startswith(said)
    assert lost[0][1] == all_too


def test_processes_have_ended_where_the_node_has_left(broker: Any) -> None:
    broker._keep_time(time.monotonic())
    assert said(broker) == []
    broker._gone = "the node has left"
    broker._keep_time(time.monotonic())
    [status] = said(broker)
    assert (status.name, status.code, status.cause) == ("trainer", -9, "the node has left")
    assert not broker._calls


def test_an_actor_that_is_silent_while_no_head_can_tell_its_end_is_lost(runs: Any) -> None:
    later = time.monotonic() + broker_of_ray.SILENT_SECONDS + 1
    runs._keep_time(later)
    assert [status.code for status in said(runs)] == [None], "the head would tell"
    runs._head_is_lost = True
    runs._keep_time(time.monotonic())
    assert [status.code for status in said(runs)] == [None], "it has answered"
    runs._keep_time(later)
    assert (said(runs)[-1].code, said(runs)[-1].cause) == (
        -9,
        "its actor and the Ray head are silent",
    )
    assert not runs._calls


def test_a_node_that_is_not_reached_at_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [ActorUnavailableError("reset by peer", None), "the node"]

    def get(_asked: Any, timeout: float) -> Any:
        assert timeout > 0
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(cluster_of_ray, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr(cluster_of_ray, "_AGAIN_SECONDS", 0.0)
    cluster = MagicMock()
    until = time.monotonic() + 60
    assert cluster_of_ray.Cluster._answer(cluster, MagicMock(), None, until) == "the node"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("foo", "is not HOST:PORT, auto or null"),
        ("ray://127.0.0.1:10001", "Ray's client .* is not used"),
        ("no.such.host.invalid:6379", "does not know the host 'no.such.host.invalid'"),
        ("127.0.0.1:1", "nothing listens at 127.0.0.1:1"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused_by_name(address: str, said: str) -> None:
    with pytest.raises(cluster_of_ray.ClusterRefused, match=said):
        cluster_of_ray.check_port(address)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(cluster_of_ray.ClusterRefused, match=r"bind_address: .* at 192\.0\.2\.77"):
        cluster_of_ray._listen("192.0.2.77")
    host, _, port = cluster_of_ray._listen("127.0.0.1").rpartition(":")
    for _ in range(3):
        socket.create_connection((host, int(port)), 30).close()


def test_a_misspelt_runtime_environment_is_refused() -> None:
    cluster_of_ray.check_runtime_env({"env_vars": {"A": "b"}, "pip": ["x"]})
    with pytest.raises(
        cluster_of_ray.ClusterRefused, match=r"does not know env_var; it knows .*pip"
    ):
        cluster_of_ray.check_runtime_env({"env_var": {"A": "b"}})
