"""The relays of a run: one process on each node that has others, if the launcher wants it.

A lost relay is replaced as long as its node has processes. It counts against a separate limit
(`max_relay_restarts` of `launcher.ray` or `launcher.agents`): generators and the trainer continue.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from asyncrl.config.launcher import LauncherConfig
from asyncrl.errors import RunFailed
from asyncrl.fleet.process_state import RelayWorker, Worker
from asyncrl.launch.child_spec import RelaySpec, keys_of
from asyncrl.launch.interface import Launcher
from asyncrl.wire import RunKey

_PAUSE_SECONDS = 1.0
_NOT_READY_SECONDS = 5.0
"""The same if the last one was never ready: its node may be gone, which is soon known."""


@dataclass(eq=False)
class Relays:
    """Starts relays, and knows each node's; `_next_index` numbers the run's processes."""

    config: LauncherConfig
    _launcher: Launcher
    _spec: RelaySpec
    _run_key: RunKey
    _next_index: Callable[[], int]
    _workers: dict[str, RelayWorker] = field(default_factory=dict)
    _of_nodes: dict[str, list[RelayWorker]] = field(default_factory=dict)
    """All relays that each node ever had, the current one last."""
    _started: dict[str, float] = field(default_factory=dict)
    _restarts: dict[str, int] = field(default_factory=dict)

    @property
    def are_used(self) -> bool:
        """True if each node with processes of the run has one."""
        return self._launcher.uses_relays

    @property
    def alive(self) -> list[RelayWorker]:
        """Relays that are not known to have ended."""
        return [worker for worker in self._workers.values() if not worker.is_gone]

    def get(self, name: str) -> RelayWorker | None:
        """Return the relay of this name, lost ones included."""
        return self._workers.get(name)

    def on(self, node: str) -> RelayWorker | None:
        """Return the living relay of a node."""
        workers = self._of_nodes.get(node)
        return workers[-1] if workers and not workers[-1].is_gone else None

    def names_on(self, node: str) -> list[str]:
        """Return the names of all relays that a node ever had."""
        return [worker.name for worker in self._of_nodes.get(node, ())]

    def by_node(self) -> dict[str, RelayWorker]:
        """Return the relay of each node that has a ready one."""
        found = {node: workers[-1] for node, workers in self._of_nodes.items()}
        return {node: one for node, one in found.items() if one.state == "ready"}

    def start_missing(self, nodes: Iterable[str | None]) -> list[str]:
        """Start a relay on each of these nodes that has none; return sentences about replacements.

        `nodes` are those of the run's living processes, None if unplaced. Raises RunFailed if one
        would have to be replaced, and that is not allowed any more.
        """
        said: list[str] = []
        if not self.are_used:
            return said
        now = time.monotonic()
        for node in dict.fromkeys(nodes):
            if node is None or self.on(node) is not None:
                continue
            earlier = self._of_nodes.get(node, [])
            failed = any(not one.is_ready for one in earlier[-1:])
            pause = _NOT_READY_SECONDS if failed else _PAUSE_SECONDS
            if now - self._started.get(node, -pause) >= pause:
                said += self._start(node)
        return said

    def note_lost(self, worker: Worker) -> None:
        """Forget relay failures on a node that was lost with this process: it caused them."""
        if worker.handle.lost_with_machine and worker.node is not None:
            self._restarts.pop(worker.node, None)

    def _start(self, node: str) -> list[str]:
        earlier = self._of_nodes.setdefault(node, [])
        name = f"relay-{list(self._of_nodes).index(node)}"
        said = []
        if earlier:
            lost, limit = earlier[-1], self.config.cluster.max_relay_restarts
            if sum(self._restarts.values()) >= limit:
                raise RunFailed(
                    f"{lost.name} was lost, and {self.config.cluster_key}.max_relay_restarts "
                    f"({limit}) does not allow another; the end of its log:\n"
                    f"{lost.handle.log_tail()}"
                )
            self._restarts[node] = self._restarts.get(node, 0) + 1
            name = f"{name}.{len(earlier)}"
            said = [f"started {name} in place of {lost.name}"]
        spec = msgspec.structs.replace(self._spec, name=name, process_index=self._next_index())
        keys = keys_of(self._run_key, name, "relay")
        worker = RelayWorker(spec, self._launcher.start(spec, keys, node))
        self._workers[name] = worker
        earlier.append(worker)
        self._started[node] = time.monotonic()
        return said
