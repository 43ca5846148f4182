"""Controller to agent: orders for its machine.

The controller repeats all orders every second, and an agent carries out what is new in them. So a
lost message or connection costs a second, and nothing is acknowledged.
"""

import msgspec

NO_SESSION = ""
"""Session of orders to an unknown agent, which ends its processes and says hello."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class Welcome(Message, frozen=True):
    """The agent may take part. It answers with `State` and the facts of its machine."""

    session: str
    """Session of this controller; another one has another."""
    run: str
    question: str
    """JSON: the questions about its machine (`asyncrl.launch.node_child.node_facts`)."""
    lost_seconds: float
    """The controller counts as lost after this long without a message."""


class Refused(Message, frozen=True):
    """The agent cannot take part, and should end."""

    reason: str


class Start(msgspec.Struct, frozen=True):
    """Start a process."""

    order: str
    """JSON (`asyncrl.launch.start_order`)."""
    keys: bytes
    """`ChildKeys`, for its standard input."""

    def __repr__(self) -> str:
        return "Start()"


class Wanted(msgspec.Struct, frozen=True):
    """A process that the controller counts on, or is about to forget."""

    name: str
    start: Start | None = None
    """None: the agent has reported it."""
    ending: bool = False
    by_force: bool = False
    ready: bool = False


class Orders(Message, frozen=True):
    """All orders for the agent; its other processes have ended."""

    session: str
    processes: tuple[Wanted, ...] = ()
    note: str = ""
    """Reason why the agent waits, for its log."""


class Over(Message, frozen=True):
    """The run has ended, and all processes with it."""

    session: str
    text: str


ToAgent = Welcome | Refused | Orders | Over
