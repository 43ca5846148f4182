"""Agent to controller: what its machine has, and what became of its processes."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class Hello(Message, frozen=True):
    """An agent that has no process of any run would like to take part."""

    role: str
    """`generator`, `trainer` or `any`."""
    host: str
    """By which the machine is called."""
    address: str
    """Under which other machines reach its processes."""
    gpus: int
    python: str
    """Major and minor version."""
    asyncrl: str
    """Version and digest of the code (`asyncrl.launch.node_child.code_version`)."""
    beginning: str
    """Random; the same as long as it says hello again because it is not answered."""


class Hosted(msgspec.Struct, frozen=True):
    """A process that the agent has started, or could not start."""

    name: str
    code: int | None
    """Its exit code; None while it runs."""
    cause: str
    """Why it ended, if its exit code does not say that."""
    log: str
    """Where its log is."""
    log_tail: str


class State(Message, frozen=True):
    """All that the controller needs to know, every second and whenever something changes."""

    session: str
    """Of the controller that this is for."""
    facts: str = ""
    """JSON: what was found on the machine; empty: not known yet."""
    processes: tuple[Hosted, ...] = ()
    leaves_in: float | None = None
    """Seconds after which the agent ends, because it was told to; None: it stays."""


FromAgent = Hello | State
