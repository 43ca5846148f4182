"""What the broker asks of Ray: a connection, a placement group, actors. Raises `ClusterRefused`.

Placement groups of generators that join a run on Ray: asked for, waited for, given back.

The processes that a run begins with share one group. Ray cannot give back a part of a group, so a
joiner has one of its own.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayError
from ray.runtime_env import RuntimeEnv
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from asyncrl.launch import node_child
from asyncrl.launch.nodes import NodeInfo
from asyncrl.launch.ray import actor, messages
from asyncrl.launch.ray.nodes import Slot, node_info, shortage, without_missing_gpus


@dataclass(slots=True)
class _Room:
    slot: Slot
    group: PlacementGroup
    until: float | None
    """When waiting for it ends (monotonic seconds); None: it is there."""
    seconds: float


class Rooms:
    """The groups of joiners, by slot."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}

    def __contains__(self, index: int) -> bool:
        """Whether a joiner's slot was asked for and not given back."""
        return index in self._rooms

    def slot(self, index: int) -> Slot:
        """What it takes of its node."""
        return self._rooms[index].slot

    def ask(self, index: int, slot: Slot, seconds: float) -> str | None:
        """Ask Ray for a slot; why it can never be given, if that is known at once."""
        (slot,) = without_missing_gpus((slot,), ray.cluster_resources())
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        reason = shortage((slot,), nodes, "pack")
        if reason is None:
            group = placement_group([slot.bundle()], strategy="PACK")
            self._rooms[index] = _Room(slot, group, time.monotonic() + seconds, seconds)
        return reason

    def settled(self) -> list[tuple[int, str]]:
        """(slot, why not) of what was decided since the last call; empty: there is room."""
        found = []
        for index, room in list(self._rooms.items()):
            if room.until is None:
                continue
            if placement_group_table(room.group).get("state") == "CREATED":
                room.until = None
                found.append((index, ""))
            elif time.monotonic() > room.until:
                self.give_back(index)
                found.append((index, _no_room(room)))
        return found

    def place(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Where its actor is."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self._rooms[index].group, placement_group_bundle_index=0
        )

    def give_back(self, index: int) -> None:
        """Ray may give it to others; an actor in it is killed."""
        remove_placement_group(self._rooms.pop(index).group)

    def close(self) -> None:
        """Give everything back."""
        for index in list(self._rooms):
            self.give_back(index)


def _no_room(room: _Room) -> str:
    free = ", ".join(
        f"{key} {value:g}"
        for key, value in sorted(ray.available_resources().items())
        if key in ("CPU", "GPU")
    )
    return (
        f"{room.slot.name} would need {room.slot.bundle()}, and the Ray cluster did not give it "
        f"within {room.seconds:g} s; free are {free or 'nothing'}. Add a node (`ray start "
        "--address=HOST:PORT`) and order it again"
    )


_PORT_SECONDS = 5.0
_OBJECT_BYTES = 100 << 20
"""Object store of a cluster of this machine alone: only small messages go through it."""
_THREADS = 4
"""Of an actor: one call waits, others end it meanwhile."""
_AGAIN_SECONDS = 1.0
_END_SECONDS = 3.0
"""Longest wait for an actor to kill its child before another one takes its place."""

Say = Callable[[str, float], None]


class ClusterRefused(Exception):  # noqa: N818 - as in `Refused`
    """The cluster cannot carry the run; the text is for the user."""


class Cluster:
    """A connection to a Ray cluster, with room for the run.

    Args:
        asked: what the controller wants.
        say: is told what is waited for, and how long at most.
    """

    def __init__(self, asked: messages.Open, say: Say) -> None:
        self._asked = asked
        self._say = say
        self._runtime_env = json.loads(asked.runtime_env)
        check_runtime_env(self._runtime_env)
        self.slots: tuple[Slot, ...] = asked.slots
        self.rooms = Rooms()
        """Of generators that join."""
        self.actors: dict[int, Any] = {}
        """By slot."""
        self._others: dict[str, Any] = {}
        """Those without a slot, by the name of their process."""
        self._connect()
        question = json.loads(asked.question)
        self.bind_address = question["bind_address"] or str(ray.util.get_node_ip_address())
        """Of this machine, where the controller listens."""
        probe = _listen(self.bind_address)
        self.question = json.dumps(question | {"probe": probe})
        """What each actor is asked about its node."""
        total = ray.cluster_resources()
        self.slots = without_missing_gpus(asked.slots, total)
        self._group = self._reserve()

    def _connect(self) -> None:
        address = self._asked.address
        shown = "a cluster of this machine" if address is None else f"the Ray head at {address}"
        self._say(f"an answer of {shown} (launcher.ray.connect_seconds)", _seconds(self._asked))
        if address is not None and address != "auto":
            check_port(address)
        quiet: dict[str, Any] = {
            "log_to_driver": False, "logging_level": "ERROR", "configure_logging": False,
            "include_dashboard": False,
        }  # fmt: skip
        if address is None:
            # Locally, processes may share cores as they do without Ray.
            cores = max(sum(slot.cpus for slot in self._asked.slots), 1.0)
            custom: dict[str, float] = {}
            for slot in self._asked.slots:
                for key, amount in slot.resources.items():
                    custom[key] = custom.get(key, 0.0) + amount
            quiet |= {
                "num_cpus": int(cores + 0.999), "object_store_memory": _OBJECT_BYTES,
                "resources": custom, "address": "local",
            }  # fmt: skip
        else:
            quiet = {key: quiet[key] for key in quiet if key != "include_dashboard"}
            quiet["address"] = address
        try:
            ray.init(**quiet)
        except (ConnectionError, RayError, RuntimeError, ValueError, OSError) as error:
            raise ClusterRefused(
                f"launcher.ray.address: {address}: Ray does not connect: {one_line(error)}. The "
                "head must run (`ray start --head`), this machine must be a node of its cluster "
                "(`ray start --address=HOST:PORT`), and both need the same versions of Ray and "
                "Python"
            ) from error

    @property
    def address(self) -> str:
        """Of the head."""
        return str(ray.get_runtime_context().gcs_address)

    def _reserve(self) -> PlacementGroup:
        """One bundle for each process."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        reason = shortage(self.slots, nodes, self._asked.strategy)
        if reason is not None:
            raise ClusterRefused(reason)
        limit = self._asked.place_seconds
        self._say("room on the nodes of the Ray cluster (launcher.ray.place_seconds)", limit + 5)
        group = placement_group(
            [slot.bundle() for slot in self.slots], strategy=self._asked.strategy.upper()
        )
        if not group.wait(limit):
            free = ", ".join(
                f"{key} {value:g}"
                for key, value in sorted(ray.available_resources().items())
                if key in ("CPU", "GPU")
            )
            wanted = [slot.bundle() for slot in self.slots]
            remove_placement_group(group)
            raise ClusterRefused(
                f"the Ray cluster has enough for this run, but did not give it within {limit:g} s "
                f"(launcher.ray.place_seconds): wanted are bundles {wanted} with strategy "
                f"{self._asked.strategy}, free are {free or 'nothing'}. Others use the rest"
            )
        return group

    def create(self, index: int) -> Any:
        """Make the actor of a slot, in place of an earlier one."""
        earlier = self.actors.pop(index, None)
        if earlier is not None:
            # First its child: two must never share a GPU or a folder of checkpoints.
            ray.wait([earlier.end.remote(True)], timeout=_END_SECONDS)
            ray.kill(earlier)
        if index in self.rooms:
            place = self.rooms.place(index)
        else:
            place = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=index
            )
        self.actors[index] = made = self._make(self.slot(index), place)
        return made

    def slot(self, index: int) -> Slot:
        """The slot of this index."""
        return self.rooms.slot(index) if index in self.rooms else self.slots[index]

    def give_back(self, index: int) -> bool:
        """A generator has left: give its room back, if it has one of its own."""
        if index not in self.rooms:
            return False
        if (one := self.actors.pop(index, None)) is not None:
            ray.kill(one)
        self.rooms.give_back(index)
        return True

    def create_on(self, node: str, name: str) -> Any:
        """Make the actor of a process that takes nothing of its node."""
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        self._others[name] = made = self._make(Slot(name, 0.0), place)
        return made

    def drop(self, name: str) -> None:
        """A process without a slot has ended."""
        ray.kill(self._others.pop(name))

    def everyone(self) -> list[Any]:
        """All actors."""
        return [*self.actors.values(), *self._others.values()]

    def _make(self, slot: Slot, place: Any) -> Any:
        return (
            ray.remote(actor.ProcessActor)
            .options(
                num_cpus=slot.cpus,
                num_gpus=slot.gpus,
                resources=slot.resources,
                max_restarts=0,
                max_concurrency=_THREADS,
                runtime_env=self._runtime_env or None,
                scheduling_strategy=place,
            )
            .remote()
        )

    def open(self) -> tuple[NodeInfo, ...]:
        """Make every actor and ask it about its node."""
        for module in (actor, node_child):
            cloudpickle.register_pickle_by_value(module)
        limit = self._asked.place_seconds
        self._say("an answer of each node (launcher.ray.place_seconds)", limit + 5)
        until = time.monotonic() + limit
        try:
            made = [self.create(index) for index in range(len(self.slots))]
        except (ValueError, TypeError) as error:
            raise ClusterRefused(
                f"launcher.ray.runtime_env, launcher.ray.image: Ray refuses them: {one_line(error)}"
            ) from error
        asked = [one.describe.remote(self.question) for one in made]
        answers = []
        for slot, one, answering in zip(self.slots, made, asked, strict=True):
            try:
                answer = self._answer(one, answering, until)
            except (RayError, TimeoutError) as error:
                raise ClusterRefused(
                    f"the Ray actor of {slot.name} did not start: {one_line(error)}. Its node "
                    "needs the same versions of Python and Ray, and whatever "
                    "launcher.ray.runtime_env and launcher.ray.image name"
                ) from error
            answers.append(node_info(str(answer)))
        return tuple(answers)

    def _answer(self, one: Any, asked: Any, until: float) -> Any:
        """What an actor says of its node. It is asked again if the connection to it breaks."""
        while True:
            try:
                return ray.get(asked, timeout=max(0.1, until - time.monotonic()))
            except ActorUnavailableError:
                if time.monotonic() > until:
                    raise
                time.sleep(_AGAIN_SECONDS)
                asked = one.describe.remote(self.question)

    def close(self) -> None:
        """Give the room back and disconnect; ends a cluster of this machine alone."""
        for one in self.everyone():
            ray.kill(one)
        self.rooms.close()
        remove_placement_group(self._group)
        ray.shutdown()


def _seconds(asked: messages.Open) -> float:
    # A cluster of this machine is started, which takes longer than a connection.
    return asked.connect_seconds + (30.0 if asked.address is None else 0.0)


def _listen(host: str) -> str:
    """Listen, so that nodes can try whether they reach this machine; HOST:PORT."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=512)
    except OSError as error:
        raise ClusterRefused(
            f"launcher.ray.bind_address: this machine cannot listen at {host} ({error.strerror}); "
            "it must be one of its own addresses, which the other nodes can reach"
        ) from error

    def accept() -> None:
        while True:
            listener.accept()[0].close()

    threading.Thread(target=accept, name="probe", daemon=True).start()
    return f"{host}:{listener.getsockname()[1]}"


def check_port(address: str) -> None:
    """Refuse an address at which there can be no head, before Ray waits for it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        raise ClusterRefused(
            f"launcher.ray.address: {address!r} is not HOST:PORT, auto or null. Ray's client "
            "(ray://) is not used: run the controller on a node of the cluster"
        )
    try:
        socket.create_connection((host, int(port)), _PORT_SECONDS).close()
    except socket.gaierror as error:
        raise ClusterRefused(
            f"launcher.ray.address: this machine does not know the host {host!r} ({error.strerror})"
        ) from error
    except OSError as error:
        raise ClusterRefused(
            f"launcher.ray.address: nothing listens at {address} ({error}). Start the head with "
            "`ray start --head --port=PORT`, or open that port in the firewall"
        ) from error


def check_runtime_env(runtime_env: dict[str, Any]) -> None:
    """Refuse fields that Ray would ignore."""
    unknown = sorted(runtime_env.keys() - RuntimeEnv.known_fields)
    if unknown:
        known = sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_"))
        raise ClusterRefused(
            f"launcher.ray.runtime_env: Ray {ray.__version__} does not know {', '.join(unknown)}; "
            f"it knows {', '.join(known)}"
        )


def one_line(error: BaseException) -> str:
    """The end of what Ray says, without its line breaks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[-3:])}"[:600]
