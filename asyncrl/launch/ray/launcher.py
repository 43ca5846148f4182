"""The controller's side of the Ray launcher. Nothing here waits for Ray.

A handle knows what the broker said last about its process. The broker and all that it started end
when its pipe is closed, which the kernel does if the controller is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.launch.child_spec import ChildKeys, ChildSpec, GeneratorSpec, TrainerSpec
from asyncrl.launch.interface import ProcessHandle
from asyncrl.launch.nodes import Machines, ranks_apart
from asyncrl.launch.ray import messages
from asyncrl.launch.ray.connect import NODES_FILE, BrokerProcess, open_cluster
from asyncrl.launch.ray.nodes import Slot
from asyncrl.launch.records import ProcessRecords
from asyncrl.launch.start_order import inline_config, random_letters, start_order

ROOM_SECONDS = 6.0
"""Longest wait for room for a joiner. The user waits for the answer, for 10 s."""
_ANSWER_SECONDS = 2.0
"""Longest wait for the broker's answer, in addition."""
_BROKER_LOST = -9
"""Exit code of all processes when the broker is gone: its end is theirs."""


class RayProcess:
    """A process on some node.

    Args:
        spec: of the process.
        say: gives the broker an order.
        machines: which nodes are one.
        home: address of the controller's node.
    """

    def __init__(
        self,
        spec: ChildSpec,
        say: Callable[[messages.End], None],
        machines: Machines,
        home: str,
    ) -> None:
        self._home = home
        self.spec = spec
        self._say = say
        self._machines = machines
        self._status = messages.Status(spec.name, None, "", "(waits for its node)", "")

    def exit_code(self) -> int | None:
        """None while the process runs; negative for a signal, or if its actor was lost."""
        return self._status.code

    @property
    def node(self) -> str | None:
        """The node that it is on, as `Machines` names it; None while it is not placed."""
        info = self._status.node
        return None if info is None else self._machines.name_of(info)

    @property
    def address(self) -> str:
        """Of its node, where other nodes reach it; empty: the controller's node, or not placed."""
        info = self._status.node
        return "" if info is None or info.ip == self._home else info.ip

    @property
    def node_id(self) -> str | None:
        """Ray's id of its node while it runs there; otherwise None."""
        info = self._status.node
        return None if info is None or self._status.code is not None else info.id

    @property
    def lost_with_machine(self) -> bool:
        """Whether its node left the cluster, or no node had room for it."""
        return self._status.node_lost

    def cause(self) -> str:
        """Why it ended, where its exit code does not say it."""
        return self._status.cause

    def end(self, *, by_force: bool) -> None:
        """Send SIGTERM to the process, or SIGKILL to it and its children."""
        if self._status.code is None:
            self._say(messages.End(self.spec.name, by_force))

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of its log, as they were at most a few seconds ago."""
        return "\n".join(self._status.log_tail.splitlines()[-lines:]) or "(its log is empty)"

    def update(self, status: messages.Status) -> None:
        """Note what the broker said; a process ends once."""
        if self._status.code is None:
            self._status = status

    def lose(self, cause: str) -> None:
        """The broker is gone."""
        self.update(replace(self._status, code=_BROKER_LOST, cause=cause))


class RayLauncher:
    """Starts processes on the nodes of a Ray cluster. `open` makes one.

    Args:
        config: of the run.
        run_directory: absolute.
        records: holds the mark of the run's processes.
        broker: has room for them.
        opened: what it said.
        slots: that it has room for: those of the trainer's ranks, then the generators'.
    """

    def __init__(
        self,
        config: RunConfig,
        run_directory: Path,
        records: ProcessRecords,
        broker: BrokerProcess,
        opened: messages.Opened,
        slots: tuple[Slot, ...],
    ) -> None:
        self._config = config
        self._run = run_directory
        self._mark = records.mark
        records.add("ray", broker.process.pid)  # a resumed run ends what is left of this one
        self._broker = broker
        self._slots, self._nodes = slots, list(opened.nodes)
        always = config.launcher.ray.relays == "always"
        self._machines = Machines(opened.memory, opened.nodes, always=always)
        self._home = opened.node_ip
        self.node_ip = config.launcher.ray.bind_address or opened.node_ip
        """Of this machine, as the other nodes know it."""
        self.address = opened.address
        self.run_id = f"{config.run.name}-{random_letters()}"
        """Ends with letters: no process id belongs to it, so nobody takes its files for a dead
        process's."""
        self._processes: dict[str, RayProcess] = {}
        self._orders: queue.SimpleQueue[messages.ToBroker | None] = queue.SimpleQueue()
        self._lost: AsyncrlError | None = None
        self._on_lost: Callable[[AsyncrlError], None] | None = None
        self._ranks = config.trainer.ranks
        self._generator_slot = slots[self._ranks]
        self._joiners: set[int] = set()
        """Slots of generators that have joined."""
        self._reserving: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[str]]] = {}
        for work in (self._read, self._write):
            threading.Thread(target=work, name="ray-launcher", daemon=True).start()

    @classmethod
    async def open(
        cls,
        config: RunConfig,
        slots: tuple[Slot, ...],
        run_directory: Path,
        model_path: str,
        records: ProcessRecords,
    ) -> RayLauncher:
        """Connect and reserve room.

        Raises:
            UserError: there is no such cluster, or it cannot carry the run.
        """
        broker, opened = await open_cluster(config, slots, run_directory, model_path)
        trainer = config.trainer
        reason = ranks_apart(opened.nodes[: trainer.ranks], trainer.rank_network)
        if reason is not None:
            await broker.close()
            raise UserError(reason)
        return cls(config, run_directory, records, broker, opened, slots)

    @property
    def threads(self) -> int:
        """Of a generator."""
        return self._threads("generator")

    def _threads(self, role: str) -> int:
        launcher = self._config.launcher
        if role == "relay":
            return 1
        bundle = launcher.ray.trainer if role == "trainer" else launcher.ray.generator
        return launcher.threads or max(1, int(bundle.cpus))

    @property
    def generators_have_gpus(self) -> bool:
        """Whether Ray gave GPUs to the generators."""
        return self._nodes[self._ranks].gpus > 0

    def lines(self) -> list[str]:
        """For people: where each process is."""
        return [f"Ray cluster: {self.address}"] + [
            f"{slot.name}: node {node}" + (f", {node.gpus} GPU(s)" if node.gpus else "")
            for slot, node in zip(self._slots, self._nodes, strict=True)
        ]

    def on_lost(self, tell: Callable[[AsyncrlError], None]) -> None:
        """Have somebody told, from another thread, that the cluster is lost."""
        self._on_lost = tell
        if self._lost is not None:
            tell(self._lost)

    @property
    def uses_relays(self) -> bool:
        """Whether the run is on several machines, or `launcher.ray.relays` is `always`."""
        return self._machines.are_several

    async def make_room(self, generators: Sequence[int]) -> None:
        """Reserve a slot for each that has none. Raises UserError: Ray does not give them."""
        slots = [self._slot_of(one) for one in generators]
        missing = [slot for slot in slots if slot >= len(self._nodes) and slot not in self._joiners]
        reasons = await asyncio.gather(*(self._reserve(slot) for slot in missing))
        refused = [reason for reason in reasons if reason]
        if refused:
            for slot, reason in zip(missing, reasons, strict=True):
                if not reason:
                    self._orders.put(messages.GiveBack(slot))
            raise UserError(refused[0])
        self._joiners |= set(missing)

    async def _reserve(self, slot: int) -> str:
        """Ask for a slot; why it is not given, empty if it is."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        self._reserving[slot] = loop, answer
        what = replace(self._generator_slot, name=f"generator-{slot - self._ranks}")
        self._orders.put(messages.Reserve(slot, what, ROOM_SECONDS))
        try:
            async with asyncio.timeout(ROOM_SECONDS + _ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            self._orders.put(messages.GiveBack(slot))
            return (
                f"the process that speaks to Ray did not answer within "
                f"{ROOM_SECONDS + _ANSWER_SECONDS:g} s; see {self._run / 'logs' / 'ray.log'}"
            )
        finally:
            del self._reserving[slot]

    def _reserved(self, message: messages.Reserved) -> None:
        """Pass an answer on, from the thread that reads."""
        asked = self._reserving.get(message.slot)
        if asked is not None:
            loop, answer = asked
            with contextlib.suppress(RuntimeError):  # the run has ended
                loop.call_soon_threadsafe(_set, answer, message.reason)

    def _slot_of(self, generator: int) -> int:
        return self._ranks + generator

    def use(self, config: RunConfig) -> None:
        """Start processes with this configuration from now on."""
        self._config = config

    def give_room_back(self, generator: int) -> None:
        """Give back the slot of a joiner; those of the start are one group that stays."""
        slot = self._slot_of(generator)
        if slot in self._joiners:
            self._joiners.discard(slot)
            self._orders.put(messages.GiveBack(slot))

    def start(self, spec: ChildSpec, keys: ChildKeys, node: str | None = None) -> ProcessHandle:
        """Have the broker start `python -m asyncrl.child`; returns at once."""
        threads = self._threads(spec.role)
        spec = replace(
            spec,
            threads=threads,
            run_id=self.run_id,
            weights_directory=self._config.launcher.ray.weights_directory,
            config_json=inline_config(self._config),
        )
        order = start_order(
            spec, mark=self._mark, relay_per_node=self._config.launcher.ray.relays == "always"
        )
        handle = self._processes[spec.name] = RayProcess(
            spec, self._orders.put, self._machines, self._home
        )
        if self._lost is not None:
            handle.lose(str(self._lost))
        slot: int | None = None  # of a relay
        if isinstance(spec, TrainerSpec):
            slot = spec.rank
        elif isinstance(spec, GeneratorSpec):
            slot = self._slot_of(spec.index)
        place = "" if node is None else self._node_id(node)
        start = messages.Start(slot, spec.name, order, msgspec.msgpack.encode(keys), place)
        self._orders.put(start)
        return handle

    def _node_id(self, node: str) -> str:
        """Ray's id of a node: of several on one machine, one that has a living process."""
        living = [one.node_id for one in self._processes.values() if one.node == node]
        return next((found for found in living if found is not None), node)

    def _write(self) -> None:
        """Orders are written by a thread: a signal handler may give some at any moment."""
        while (order := self._orders.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # the broker is gone; `_read` says so
                messages.write(self._broker.input, order)

    def _read(self) -> None:
        while (message := self._broker.received.get()) is not None:
            if isinstance(message, messages.Status):
                if message.node is not None:
                    self._machines.note(message.node)
                self._processes[message.name].update(message)
            elif isinstance(message, messages.Reserved):
                self._reserved(message)
            elif isinstance(message, messages.HeadLost):
                self._lose(message.reason)
        cause = f"the process that speaks to Ray ended: {self._broker.last_words()}"
        for process in list(self._processes.values()):
            process.lose(cause)
        self._lose(cause)

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = AsyncrlError(reason)
            if self._on_lost is not None:
                self._on_lost(self._lost)

    async def close(self) -> None:
        """End the broker and what it started; waits, but not for ever."""
        self._on_lost = None
        self._orders.put(None)
        await self._broker.close()
        with contextlib.suppress(OSError):
            (self._run / NODES_FILE).unlink()


def _set(answer: asyncio.Future[str], reason: str) -> None:
    if not answer.done():
        answer.set_result(reason)
