"""Agent to controller: its machine, and the state of its processes."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class Hello(Message, frozen=True):
    """Announcement of an agent without processes of any run that offers to take part."""

    role: str
    host: str
    address: str
    """Address of its processes for other machines."""
    gpus: int
    python: str
    asyncrl: str
    """Version and digest of the code (`asyncrl.launch.node_child.code_version`)."""
    beginning: str
    """Random; unchanged while it repeats an unanswered hello."""


class Hosted(msgspec.Struct, frozen=True):
    """A process that the agent has started, or could not start."""

    name: str
    code: int | None
    """Exit code; None while it runs."""
    cause: str
    """Reason of its end, if its exit code does not tell."""
    log: str
    log_tail: str


class State(Message, frozen=True):
    """Everything that the controller needs to know, every second and whenever something changes."""

    session: str
    facts: str = ""
    """JSON: facts about the machine; empty: not known yet."""
    processes: tuple[Hosted, ...] = ()
    leaves_in: float | None = None
    """Seconds after which the agent ends, on request; None: it stays."""


FromAgent = Hello | State
