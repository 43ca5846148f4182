"""The interface of a launcher. `LocalLauncher` starts processes on this machine."""

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncrl.launch.child_spec import ChildKeys, ChildSpec

Say = Callable[[str], None]
"""Prints a line for the user."""


class ProcessHandle(Protocol):
    """One started process."""

    @property
    def node(self) -> str | None:
        """The node that it is on; None: not placed yet, "": this machine is the only one."""

    @property
    def address(self) -> str:
        """Its node's address for other nodes; empty: the controller's node, or not placed."""

    def exit_code(self) -> int | None:
        """None while the process runs; negative for a signal, as in `subprocess`."""

    @property
    def lost_with_machine(self) -> bool:
        """True if its machine was taken away or missing: its end does not count against a limit."""

    def cause(self) -> str:
        """The reason of its end if the exit code does not say it (a lost node), otherwise empty."""

    def end(self, *, by_force: bool) -> None:
        """Ask the process and its children to end, or kill them. Idempotent; does not wait."""

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines of its log, which say why it ended."""


class Launcher(Protocol):
    """Starts processes."""

    @property
    def threads(self) -> int:
        """Threads for tensor work of each process."""

    @property
    def uses_relays(self) -> bool:
        """True if each node with processes of the run gets a relay. Once true, it stays so."""

    async def make_room(self, generators: Sequence[int]) -> None:
        """Find room for added generators, by index. Raises UserError, and takes nothing then."""

    def give_room_back(self, generator: int) -> None:
        """Free the room of a generator that has left, until `make_room` for its index."""

    def start(self, spec: ChildSpec, keys: ChildKeys, node: str | None = None) -> ProcessHandle:
        """Start a process without waiting; `node` is the place, None: the launcher decides."""
