"""Controller to agent: what its machine is to do for the run.

What is repeated needs no acknowledgement: the controller sends its orders every second, whole, and
an agent carries out what is new in them. So a lost message or connection costs a second.
"""

from __future__ import annotations

import msgspec

NO_SESSION = ""
"""Orders of this session tell an agent that it is not known: it ends what it has and says hello."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class Welcome(Message, frozen=True):
    """The agent may take part. Answered by `State`, with what it finds on its machine."""

    session: str
    """Of this controller; another one has another."""
    run: str
    """Name of the run."""
    question: str
    """JSON: what the agent is asked about its machine (`asyncrl.launch.node_child.node_facts`)."""
    lost_seconds: float
    """After so long without a message the controller counts as lost."""


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
        """Without the keys."""
        return "Start()"


class Wanted(msgspec.Struct, frozen=True):
    """A process that the controller counts on, or is about to forget."""

    name: str
    start: Start | None = None
    """None: the agent has reported it."""
    ending: bool = False
    """It is to end."""
    by_force: bool = False
    """It is to be killed, with all that it has started."""
    ready: bool = False
    """It has told the controller that it can take work."""


class Orders(Message, frozen=True):
    """All that the agent is to do.

    Processes that it has and that are not named have ended, and the controller knows it.
    """

    session: str
    """Of this controller, or NO_SESSION."""
    processes: tuple[Wanted, ...] = ()
    note: str = ""
    """What the agent waits for, for its log."""


class Over(Message, frozen=True):
    """The run has ended, and all processes with it."""

    session: str
    text: str
    """How, for the agent's log."""


ToAgent = Welcome | Refused | Orders | Over
