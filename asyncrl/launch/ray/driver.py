"""The Ray driver of one run: `python -m asyncrl.launch.ray.driver`, with messages over its pipes.

orders     consumes: `Serve`, `Reserve`, `GiveBack` from the controller. produces: threads.
           waits for: the controller. unblocked by: a message, or the end of the pipe
an agent   consumes: answers of its actor. produces: `Lost`; another actor if Ray gives up.
           waits for: the end of the agent, without a limit; a thread for each
head       consumes: the head's list of nodes. produces: `NodeLeft`, and `HeadLost` once.
           waits for: the head. bounded by: HEAD_SECONDS

Ray ends a driver whose head is gone, blocks if the head is silent, and takes over signals and
logging. So it is not imported by the controller. When the controller closes the pipe, or is killed,
this process releases the room and ends, and Ray ends its actors.
"""

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # it would ship the working directory
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")  # the head's loss is handled

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.runtime_env import RuntimeEnv
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.launch.ray import actor, messages
from asyncrl.launch.ray.messages import Slot, shortage, without_missing_gpus

AGAIN_SECONDS = 1.0
"""Delay before an actor that lost its worker, agent or connection is called again."""
HEAD_SECONDS = 15.0
"""A head that has been silent for this long is lost."""
END_SECONDS = 3.0
"""Time for agents to end on their own when the run is over."""
CLOSE_SECONDS = 10.0
"""Time to release the room and disconnect."""
MESSAGE_SECONDS = 1.0
"""Delay before the head is asked again for error messages, if it had none or did not answer."""
_TICK_SECONDS = 0.1
_PORT_SECONDS = 5.0
_OBJECT_BYTES = 100 << 20
"""Object store of a cluster of this machine alone, which holds only small messages."""
_THREADS = 4
"""Threads of an actor: one call waits for its agent, others ask for its place."""


class ClusterRefused(Exception):  # noqa: N818 - as in `Refused`
    """The cluster cannot carry the run. The text is for the user."""


class UnhurriedMessages:
    """The error messages of the head, for the thread of Ray that prints them.

    Without a head, Ray's `poll` returns at once, and that thread would take a whole core.
    `worker` is Ray's own record of this process.
    """

    def __init__(self, worker: Any) -> None:
        self._messages, self._ends = worker.gcs_error_subscriber, worker.threads_stopped
        self.subscribe, self.close = self._messages.subscribe, self._messages.close

    def poll(self) -> tuple[Any, Any]:
        """Wait for a message, as Ray's; return a delay later without one."""
        found: tuple[Any, Any] = self._messages.poll()
        if found[1] is None:
            self._ends.wait(MESSAGE_SECONDS)
        return found


class Driver:
    """A connection to a Ray cluster, with room for the run.

    `say` sends a message to the controller. Raises ClusterRefused if the cluster cannot be used.
    """

    def __init__(self, asked: messages.Open, say: Callable[[messages.FromDriver], None]) -> None:
        self._asked = asked
        self._say = say
        self._order: messages.Serve
        self._head_is_lost = False
        self._groups: dict[str, PlacementGroup] = {}
        """Group of each agent by the name of its slot, without released ones."""
        self._actors: dict[str, Any] = {}
        """The last actor of each slot."""
        self._serving: set[str] = set()
        check_runtime_env(asked.runtime_env)
        self._connect()
        self._address = str(ray.get_runtime_context().gcs_address)
        self._slots = without_missing_gpus(asked.slots, ray.cluster_resources())
        self._group = self._reserve()
        cloudpickle.register_pickle_by_value(actor)
        say(messages.Opened(self._address, str(ray.util.get_node_ip_address())))

    def _connect(self) -> None:
        address = self._asked.address
        shown = "a cluster of this machine" if address is None else f"the Ray head at {address}"
        # A cluster of this machine is started, which takes longer than a connection.
        seconds = self._asked.connect_seconds + (30.0 if address is None else 0.0)
        what = f"an answer of {shown} (launcher.ray.connect_seconds)"
        self._say(messages.Stage(what, seconds))
        if address is not None and address != "auto":
            check_port(address)
        options: dict[str, Any] = {
            "address": address or "local", "log_to_driver": False, "logging_level": "ERROR",
            "configure_logging": False,
        }  # fmt: skip
        if address is None:
            # Locally, processes may share cores as they do without Ray.
            custom: dict[str, float] = {}
            for slot in self._asked.slots:
                for key, amount in slot.resources.items():
                    custom[key] = custom.get(key, 0.0) + amount
            cores = max(sum(slot.cpus for slot in self._asked.slots), 1.0)
            options |= {
                "num_cpus": int(cores + 0.999), "object_store_memory": _OBJECT_BYTES,
                "resources": custom, "include_dashboard": False,
            }  # fmt: skip
        try:
            ray.init(**options)
        except (ConnectionError, RayError, RuntimeError, ValueError, OSError) as error:
            raise ClusterRefused(
                f"launcher.ray.address: {address}: Ray does not connect: {one_line(error)}. The "
                "head must run (`ray start --head`), this machine must be a node of its cluster "
                "(`ray start --address=HOST:PORT`), and both need the same versions of Ray and "
                "Python"
            ) from error
        worker = ray._private.worker.global_worker  # noqa: SLF001 - there is no other way
        worker.gcs_error_subscriber = UnhurriedMessages(worker)

    def _reserve(self) -> PlacementGroup:
        """Reserve a bundle for each agent that the run begins with. Raises ClusterRefused."""
        limit, strategy = self._asked.place_seconds, self._asked.strategy
        if (reason := shortage(self._slots, _resources(), strategy)) is not None:
            raise ClusterRefused(reason)
        what = "room on the nodes of the Ray cluster (launcher.ray.place_seconds)"
        self._say(messages.Stage(what, limit + 5))
        wanted = [slot.bundle() for slot in self._slots]
        group = placement_group(wanted, strategy=strategy.upper())
        if not group.wait(limit):
            free = _free()
            remove_placement_group(group)
            raise ClusterRefused(
                f"the Ray cluster has enough resources for this run, but did not provide them "
                f"within {limit:g} s (launcher.ray.place_seconds): needed are bundles {wanted} "
                f"with strategy {strategy}, free are {free}; other jobs use the rest. Wait for "
                "them, or add nodes"
            )
        return group

    def run(self, orders: queue.SimpleQueue[messages.ToDriver | None]) -> None:
        """Serve until the controller closes its pipe, which is None in the queue."""
        _in_thread(self._watch_head)
        while (order := orders.get()) is not None:
            match order:
                case messages.Serve():
                    self._order = order
                    for bundle, slot in enumerate(self._slots):
                        self._groups[slot.name] = self._group
                        _in_thread(self._keep, slot, self._group, bundle)
                case messages.Reserve(slot=slot, seconds=seconds):
                    _in_thread(self._join, slot, seconds)
                case messages.GiveBack(name=name):
                    self._give_back(name)

    def _keep(self, slot: Slot, group: PlacementGroup, bundle: int = 0) -> None:
        """Keep an agent running in a slot until the slot is released."""
        node = worker = trouble = ""
        one: Any = None
        while self._groups.get(slot.name) is group:
            try:
                if one is None:
                    one = self._actors[slot.name] = self._make(slot, group, bundle)
                where = ray.get(one.where.remote(self._order.controller))
            except ActorUnavailableError as error:  # Ray restarts it, or a connection broke
                trouble = _lost(error)
            except RayError as error:
                self._say(messages.Lost(slot.name, _lost(error)))
                if one is not None:
                    with contextlib.suppress(Exception):  # it may be gone, and the head too
                        ray.kill(one)
                one, worker = None, ""  # another one takes its place
            except (ValueError, TypeError) as error:
                settings = "launcher.ray.runtime_env or launcher.ray.image"
                why = f"Ray refuses {settings}: {one_line(error)}"
                self._say(messages.Lost(slot.name, why))
                return
            else:
                if worker and where[1] != worker:
                    if where[0] != node:  # a bundle moves if its node is lost, and only then
                        self._say(messages.NodeLeft(node))
                    self._say(messages.Lost(slot.name, trouble))
                node, worker, unreachable = where
                trouble = self._unreachable(slot, unreachable) or self._serve(slot, one)
            time.sleep(AGAIN_SECONDS)
        if slot.name not in self._groups:  # or it was reserved again, and has a new agent
            self._say(messages.Lost(slot.name, "its room was released"))

    def _make(self, slot: Slot, group: PlacementGroup, bundle: int) -> Any:
        """Create an actor, which Ray restarts when its worker or node is lost."""
        made = ray.remote(actor.AgentActor).options(
            num_cpus=slot.cpus,
            num_gpus=slot.gpus,
            resources=slot.resources,
            max_restarts=-1,
            max_concurrency=_THREADS,
            runtime_env=self._asked.runtime_env or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        )
        return made.remote()

    def _serve(self, slot: Slot, one: Any) -> str:
        """Run an agent until it ends or its actor is lost; return the cause."""
        order = self._order
        arguments = [
            *("--once", "--grace", "0", "--controller", order.controller),
            *("--role", slot.role, "--name", slot.name),
        ]
        self._serving.add(slot.name)
        try:
            code, words = ray.get(one.serve.remote(arguments, order.secret))
            cause = f"its agent ended with exit code {code}: {words}"
        except RayTaskError as error:
            cause = f"its agent did not start: {one_line(error.cause)}"
        except RayError as error:  # or a connection broke, and the agent lives
            return _lost(error)
        finally:
            self._serving.discard(slot.name)
        self._say(messages.Lost(slot.name, cause))
        return cause

    def _unreachable(self, slot: Slot, why: str) -> str:
        if not why:
            return ""
        cause = (
            f"its node cannot reach this machine at {self._order.controller}: {why}. Open the "
            "firewall for connections between the nodes (the system chooses the ports), or set "
            "launcher.ray.bind_address to another address of this machine"
        )
        self._say(messages.Lost(slot.name, cause))
        return cause

    def _join(self, slot: Slot, seconds: float) -> None:
        """Reserve a separate group, since Ray cannot release a part of one; run its agent."""
        (slot,) = without_missing_gpus((slot,), ray.cluster_resources())
        if (reason := shortage((slot,), _resources(), "pack")) is None:
            group = self._groups[slot.name] = placement_group([slot.bundle()], strategy="PACK")
            if not group.wait(seconds):
                self._give_back(slot.name)
                reason = (
                    f"{slot.name} needs {slot.bundle()}, and the Ray cluster did not provide it "
                    f"within {seconds:g} s; free are {_free()}. Add a node (`ray start "
                    "--address=HOST:PORT`) and repeat the order"
                )
        self._say(messages.Reserved(slot.name, reason or ""))
        if reason is None:
            self._keep(slot, group)

    def _give_back(self, name: str) -> None:
        """Release a slot to other jobs; Ray kills an actor in it."""
        if (group := self._groups.pop(name, None)) is not None:
            remove_placement_group(group)
        self._actors.pop(name, None)

    def _watch_head(self) -> None:
        mine = ray.get_runtime_context().get_node_id()
        known: set[str] = set()

        def ask() -> bool:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            for node in known - alive:
                self._say(messages.NodeLeft(node))
            known.clear()
            known.update(alive)
            return mine in alive

        reason, agents_too = watch(ask, self._address)
        self._head_is_lost = True
        self._say(messages.HeadLost(reason, agents_too))

    def close(self) -> None:
        """Wait for the agents' end, then release the room. Bounded, whatever Ray does."""
        threading.Timer(END_SECONDS + CLOSE_SECONDS, os._exit, (1,)).start()
        until = time.monotonic() + END_SECONDS
        while self._serving and time.monotonic() < until:
            time.sleep(_TICK_SECONDS)
        for one in list(self._actors.values()):
            one.leave.remote()
        time.sleep(_TICK_SECONDS)
        if not self._head_is_lost:  # without a head there is nothing to release
            for group in {self._group, *self._groups.values()}:
                remove_placement_group(group)
            ray.shutdown()


def watch(
    ask: Callable[[], bool], address: str, *, seconds: float = HEAD_SECONDS
) -> tuple[str, bool]:
    """Wait until the cluster is lost; return the reason, and True if Ray has ended the agents.

    Ray ends the processes of a driver whose node is gone, without a message to the driver. `ask`
    asks the head whether this machine is one of its nodes; it raises or hangs without an answer.
    After `seconds` without an answer, the head at `address` is lost.
    """
    heard = [time.monotonic()]
    is_out = threading.Event()

    def keep_asking() -> None:
        while not is_out.is_set():
            with contextlib.suppress(Exception):  # one failure does not count
                if not ask():
                    is_out.set()
                heard[0] = time.monotonic()
            is_out.wait(seconds / 5)

    _in_thread(keep_asking)
    while time.monotonic() - heard[0] < seconds:
        if is_out.wait(seconds / 30):
            return (
                f"this machine's node has left the Ray cluster at {address}: its raylet ended, or "
                "the head counted it as dead, and Ray ended the run's processes. Start Ray on this "
                f"machine again (`ray start --address={address}`), and continue with --resume"
            ), True
    return (
        f"the Ray head at {address} has not answered for {seconds:.0f} s. The run's processes end "
        "after a checkpoint; start the cluster again, and continue with --resume"
    ), False


def _in_thread(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def _resources() -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _free() -> str:
    free = ray.available_resources()
    return ", ".join(f"{key} {free[key]:g}" for key in ("CPU", "GPU") if key in free) or "nothing"


def check_port(address: str) -> None:
    """Refuse an address without a head, before Ray waits for it. Raises ClusterRefused."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        raise ClusterRefused(
            f"launcher.ray.address: {address!r} is not HOST:PORT, auto or null. Ray's client "
            "(ray://) is not used: run the controller on a node of the cluster"
        )
    try:
        socket.create_connection((host, int(port)), _PORT_SECONDS).close()
    except OSError as error:
        raise ClusterRefused(
            f"launcher.ray.address: nothing listens at {address} ({error}). Start the head with "
            "`ray start --head --port=PORT`, or open that port in the firewall"
        ) from error


def check_runtime_env(runtime_env: dict[str, Any]) -> None:
    """Refuse fields that Ray would ignore. Raises ClusterRefused."""
    unknown = sorted(runtime_env.keys() - RuntimeEnv.known_fields)
    if unknown:
        known = sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_"))
        raise ClusterRefused(
            f"launcher.ray.runtime_env: Ray {ray.__version__} does not know {', '.join(unknown)}; "
            f"it knows {', '.join(known)}"
        )


def _lost(error: BaseException) -> str:
    return f"its Ray actor was lost: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Return the end of Ray's message without line breaks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[-3:])}"[:600]


def main() -> None:
    """Serve the controller over standard input and output."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the controller handles them
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Ray's output goes to the log
    orders: queue.SimpleQueue[messages.ToDriver | None] = queue.SimpleQueue()
    _in_thread(_read, sys.stdin.buffer, orders)
    writing = threading.Lock()

    def say(message: messages.FromDriver) -> None:
        with writing, contextlib.suppress(OSError):  # the controller is gone, and orders end
            output.write(messages.line(message))
            output.flush()

    asked = orders.get()
    if not isinstance(asked, messages.Open):
        raise TypeError(f"{asked!r} before Open")
    try:
        driver = Driver(asked, say)
        try:
            driver.run(orders)
        finally:
            driver.close()
    except ClusterRefused as error:
        say(messages.Refused(str(error)))
    except Exception:  # noqa: BLE001 - the end of this process's log says why
        traceback.print_exc()
    finally:
        os._exit(0)  # threads that wait for Ray may never return


def _read(incoming: Iterable[bytes], orders: queue.SimpleQueue[messages.ToDriver | None]) -> None:
    for text in incoming:
        orders.put(messages.TO_DRIVER.decode(text))
    orders.put(None)
    # End even if a call of Ray does not return; Ray ends the actors then.
    threading.Timer(END_SECONDS + CLOSE_SECONDS, os._exit, (1,)).start()


if __name__ == "__main__":
    main()
