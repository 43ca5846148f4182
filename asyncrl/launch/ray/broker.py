"""Speaks to Ray for one run: `python -m asyncrl.launch.ray.broker`, messages by its pipes.

commands   consumes: `Start`, `End` from the controller. produces: calls of actors.
           waits for: the controller. unblocked by: a message, or the end of the pipe.
answers    consumes: what actors answer. produces: `Status`.
           waits for: actors, TICK_SECONDS at a time. bounded by: one call for each process.
head       consumes: answers of the head. produces: `HeadLost`, once.
           waits for: the head. bounded by: HEAD_SECONDS. (`head`)

Ray ends a driver whose head is gone, blocks where the head is silent, and takes over signals and
logging. None of that may happen to the controller. When the controller closes the pipe, or is
killed, the broker ends all processes, gives the room back and ends, at the latest after
END_SECONDS + CLOSE_SECONDS.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # it would ship the working directory
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")  # the head's loss is handled

import ray
from msgspec.structs import replace
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from asyncrl.launch.node_child import code_version, memory_of
from asyncrl.launch.nodes import NodeInfo
from asyncrl.launch.ray import messages
from asyncrl.launch.ray.cluster import Cluster, ClusterRefused, one_line
from asyncrl.launch.ray.head import watch
from asyncrl.launch.ray.node_losses import Losses
from asyncrl.launch.ray.nodes import node_info, refusal

logger = logging.getLogger("asyncrl.ray")

TICK_SECONDS = 0.1
WATCH_SECONDS = 5.0
"""Time that an actor waits for the end of its child before it reports the log all the same."""
SILENT_SECONDS = 20.0
"""Without an answer from an actor it is lost, once no head can tell that it is. It is asked every
WATCH_SECONDS."""
AGAIN_SECONDS = 1.0
"""Between questions to an actor that is not reached and that Ray does not call dead."""
KILL_SECONDS = 3.0
"""Time for an actor to kill its child. Then the actor is killed, and the keeper does it."""
END_SECONDS = 13.0
"""Time for the processes to end after SIGTERM when the controller is gone."""
CLOSE_SECONDS = 10.0
"""Time to give the room back and disconnect."""
_KILLED = -9
_TERMINATED = -15


@dataclass(slots=True)
class _Process:
    """One process of the run, from its order to its end."""

    order: messages.Start
    actor: Any
    node: NodeInfo | None = None
    """Where it is, once its actor has answered."""
    log: str = ""
    is_ending: bool = False
    """It was told to end, perhaps before there was anything to end."""
    kill_at: float | None = None
    """When its actor is killed, because the process was to be killed and has not ended."""
    begin_by: float | None = None
    """When it is given up, because no node had room for it or its node was silent."""
    heard: float = 0.0
    """When its actor last answered, in monotonic seconds."""
    again: tuple[float, str] | None = None
    """When its actor is asked again, after a connection to it broke, and what."""

    def status(self, code: int | None, cause: str = "", tail: str = "") -> messages.Status:
        """What the controller is told of it."""
        return messages.Status(self.order.name, code, cause, tail, self.log, self.node)


class Broker:
    """Carries out the controller's orders.

    Args:
        asked: the first message.
        output: to the controller.
    """

    def __init__(self, asked: messages.Open, output: BinaryIO) -> None:
        self._asked = asked
        self._output = output
        self._writing = threading.Lock()
        self._question = json.loads(asked.question)
        self._code = code_version()
        self._cluster = Cluster(asked, self._stage)
        self._nodes: dict[int, NodeInfo] = {}
        """By slot."""
        self._head_is_lost = False
        self._gone = ""
        """Why Ray has ended all processes and starts no others; empty: it has not."""
        self._used: set[int] = set()
        self._running: dict[str, _Process] = {}
        self._losses = Losses()
        self._calls: dict[Any, tuple[str, str]] = {}
        """The pending call of each process: its reference, the name and the method."""

    def open(self) -> None:
        """Reserve room and look at the nodes. Raises ClusterRefused."""
        try:
            self._nodes = dict(enumerate(self._cluster.open()))
            reason = self._refusal(self._nodes)
            if reason is not None:
                raise ClusterRefused(reason)
        except ClusterRefused:
            self._cluster.close()
            raise
        node_ip = str(ray.util.get_node_ip_address())
        memory = memory_of(Path(self._question["weights_directory"]))
        self._say(
            messages.Opened(self._cluster.address, node_ip, tuple(self._nodes.values()), memory)
        )
        threading.Thread(target=self._watch_head, daemon=True).start()

    def _refusal(self, nodes: dict[int, NodeInfo]) -> str | None:
        return refusal(
            [self._cluster.slot(index) for index in sorted(nodes)],
            [nodes[index] for index in sorted(nodes)],
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            asyncrl=self._code,
            run_directory=self._question["run_directory"],
            model=self._question["model"],
            bind_address=self._cluster.bind_address,
        )

    def _say(self, message: messages.FromBroker) -> None:
        with self._writing:
            try:
                messages.write(self._output, message)
            except OSError:
                return  # the controller is gone; the end of the other pipe says so too

    def _stage(self, what: str, seconds: float) -> None:
        self._say(messages.Stage(what, seconds))

    def run(self, orders: queue.SimpleQueue[messages.ToBroker | None]) -> None:
        """Serve until the controller closes its pipe; None in the queue stands for that."""
        while True:
            while not orders.empty():
                order = orders.get()
                if order is None:
                    return
                if isinstance(order, messages.Start):
                    self._start(order)
                elif isinstance(order, messages.End):
                    self._end(order)
                elif isinstance(order, messages.Reserve):
                    reason = self._cluster.rooms.ask(order.slot, order.what, order.seconds)
                    if reason is not None:
                        self._say(messages.Reserved(order.slot, reason))
                elif isinstance(order, messages.GiveBack):
                    self._give_back(order.slot)
            for slot, reason in self._cluster.rooms.settled():
                self._say(messages.Reserved(slot, reason))
            self._tick()

    def _give_back(self, slot: int) -> None:
        if self._cluster.give_back(slot):
            self._used.discard(slot)
            self._nodes.pop(slot, None)

    def _start(self, order: messages.Start) -> None:
        slot = order.slot
        if slot is None:
            made = self._cluster.create_on(order.node, order.name)
        else:
            if slot in self._used or slot not in self._cluster.actors:
                self._cluster.create(slot)
            self._used.add(slot)
            made = self._cluster.actors[slot]
        begin_by = time.monotonic() + self._asked.place_seconds
        self._running[order.name] = _Process(order, made, begin_by=begin_by)
        # A replacement may be on another node.
        self._ask(order.name, "describe")

    def _end(self, order: messages.End) -> None:
        process = self._running.get(order.name)
        if process is None:
            return
        process.is_ending = True
        if (end := self._losses.release(order.name)) is not None:
            self._tell(end)
            return
        process.actor.end.remote(order.by_force)
        if order.by_force and process.kill_at is None:
            process.kill_at = time.monotonic() + KILL_SECONDS

    def _tick(self) -> None:
        """Wait for answers for a moment, and kill actors that are overdue."""
        ready: list[Any] = []
        if pending := list(self._calls):
            ready, _ = ray.wait(pending, num_returns=1, timeout=TICK_SECONDS)
        else:
            time.sleep(TICK_SECONDS)
        if ready:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        for reference in ready:
            self._answered(*self._calls.pop(reference), reference)
        self._keep_time(time.monotonic())

    def _keep_time(self, now: float) -> None:
        """Do what is due."""
        if self._gone:
            self._calls.clear()
            for process in list(self._running.values()):
                self._tell(process.status(_KILLED, self._gone))
        for end in self._losses.settled(now, head_is_lost=self._head_is_lost):
            self._tell(end)
        for name, process in list(self._running.items()):
            if process.kill_at is not None and now > process.kill_at:
                ray.kill(process.actor)
                process.kill_at = now + KILL_SECONDS
            if process.again is not None and now > process.again[0]:
                self._ask(name, process.again[1])
                process.again = None
            if self._head_is_lost and process.heard and now > process.heard + SILENT_SECONDS:
                self._tell(process.status(_KILLED, "its actor and the Ray head are silent"))
            elif process.begin_by is not None and now > process.begin_by:
                ray.kill(process.actor)
                end = process.status(_KILLED, _late(self._asked.place_seconds))
                self._tell(replace(end, node_lost=process.node is None))

    def _ask(self, name: str, method: str) -> None:
        """A question that can be asked again."""
        actor = self._running[name].actor
        if method == "describe":
            self._calls[actor.describe.remote(self._cluster.question)] = name, method
        else:
            self._calls[actor.watch.remote(WATCH_SECONDS)] = name, method

    def _answered(self, name: str, method: str, reference: Any) -> None:
        process = self._running[name]
        try:
            answer = ray.get(reference)
        except RayTaskError as error:
            self._ended(name, 1, f"failed on its node: {one_line(error)}", "")
            return
        except RayError as error:
            if isinstance(error, ActorUnavailableError) and method != "start":
                process.again = time.monotonic() + AGAIN_SECONDS, method  # a connection broke
                return
            self._ended(name, _KILLED, f"its Ray actor was lost: {one_line(error)}", "")
            return
        order, process.heard = process.order, time.monotonic()
        if method == "describe":
            if process.is_ending:
                self._ended(name, _TERMINATED, "", "")
                return
            process.node = node_info(str(answer))
            if order.slot is not None:
                self._nodes[order.slot] = process.node
            reason = self._refusal(self._nodes)
            if reason is not None:
                self._ended(name, 1, reason, reason)
                return
            full = json.loads(order.order) | {
                "shares_run_directory": process.node.shares_run_directory
            }
            call = process.actor.start.remote(json.dumps(full), order.keys)
            self._calls[call] = name, "start"
            return
        if method == "start":
            process.log, process.begin_by = str(answer), None
            self._say(process.status(None))
            if process.is_ending:
                process.actor.end.remote(False)
        else:
            code, tail = answer
            if code is not None:
                self._ended(name, code, "", tail)
                return
            self._say(process.status(None, tail=tail))
        self._ask(name, "watch")

    def _ended(self, name: str, code: int, cause: str, tail: str) -> None:
        """A process has ended: told now, or once it is known whether its node has."""
        process = self._running[name]
        end, process.begin_by = process.status(code, cause, tail), None
        asked_for = process.is_ending or process.order.slot is None
        if asked_for or not self._losses.hold(end, time.monotonic()):
            self._tell(end)

    def _tell(self, end: messages.Status) -> None:
        self._say(end)
        self._losses.release(end.name)
        self._calls = {one: call for one, call in self._calls.items() if call[0] != end.name}
        if self._running.pop(end.name).order.slot is None:
            self._cluster.drop(end.name)

    def _watch_head(self) -> None:
        mine = ray.get_runtime_context().get_node_id()

        def ask() -> bool:
            return mine in self._losses.note(time.monotonic(), ray.nodes())

        def lost(reason: str, processes_too: bool) -> None:
            self._head_is_lost = True
            self._say(messages.HeadLost(reason))
            if processes_too:
                self._gone = reason

        watch(ask, self._cluster.address, lost)

    def close(self) -> None:
        """End what runs, then give the room back. Bounded, whatever Ray does."""
        threading.Timer(END_SECONDS + CLOSE_SECONDS, os._exit, (1,)).start()
        for process in self._running.values():
            process.is_ending = True
            process.actor.end.remote(False)
        until = time.monotonic() + END_SECONDS
        while self._running and time.monotonic() < until:
            self._tick()
        bound = threading.Timer(CLOSE_SECONDS, os._exit, (1,))
        bound.daemon = True
        bound.start()
        for one in self._cluster.everyone():
            one.leave.remote()
        time.sleep(TICK_SECONDS)
        if not self._head_is_lost:  # otherwise nobody takes anything back
            self._cluster.close()


def _late(seconds: float) -> str:
    return (
        f"was not started within {seconds:g} s (launcher.ray.place_seconds): no node has room for "
        "it, or its node is silent"
    )


def main() -> None:
    """Serve the controller at the other ends of standard input and output."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the controller handles them
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray prints goes to the log
    incoming = messages.read_all(sys.stdin.buffer, messages.TO_BROKER)
    asked = next(incoming)
    if not isinstance(asked, messages.Open):
        raise TypeError(f"{asked!r} before Open")
    orders: queue.SimpleQueue[messages.ToBroker | None] = queue.SimpleQueue()

    is_open = threading.Event()

    def read() -> None:
        for order in incoming:
            orders.put(order)
        if not is_open.is_set():
            os._exit(1)  # Ray ends the actors of a driver that has ended
        # Also where `run` waits for a call of Ray's that does not return.
        threading.Timer(END_SECONDS + CLOSE_SECONDS, os._exit, (1,)).start()
        orders.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        broker = Broker(asked, output)
        broker.open()
    except ClusterRefused as error:
        messages.write(output, messages.Refused(str(error)))
        os._exit(0)
    is_open.set()
    try:
        broker.run(orders)
    finally:
        broker.close()
        os._exit(0)  # threads that wait for Ray may never return


if __name__ == "__main__":
    main()
