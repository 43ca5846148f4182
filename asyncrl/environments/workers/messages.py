"""The messages between the pool and a worker process of environments.

Frames on the worker's standard streams (`asyncrl.user_code.streams`). The pool sends one `Setup`.
After the answer to it come calls, any number at once but one at a time for a session, each answered
by the message opposite or by `Failed`:

    Open ──► Opened        Step ──► Stepped        Restore ──► Restored        Close (no answer)

`Hanging` comes unasked. Import-light: worker processes load this file.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.environments.protocol import Action, FailureReason, Traits


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Load what makes these environments."""

    name: str
    args: dict[str, Any]
    search_path: str
    """Folder that the user's modules are imported from."""
    reset_timeout_seconds: float
    step_timeout_seconds: float


class Open(msgspec.Struct, frozen=True, tag=True):
    """Make an environment and reset it."""

    call: int
    """Number of the call, unique within a pool; the answer carries it."""
    session: int
    """Number of the new session, unique within a pool."""
    row: dict[str, Any]
    seed: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Give a session the policy's turn."""

    call: int
    session: int
    action: Action


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Go back to before this turn, by the snapshot that was taken then.

    Nothing is to be done if the turn never began: it could not be sent, or `snapshot` has failed.
    """

    call: int
    session: int
    turn: int
    """Number of the turn, from 0."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """End a session, after the call that it is answering. Not answered."""

    session: int


class Opened(msgspec.Struct, frozen=True, tag=True):
    """What `reset` returned, and the environment's traits."""

    call: int
    first: Any
    """Checked where it is received."""
    traits: Traits
    max_turn_tokens: int | None = None
    """Longest next turn of the policy."""


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """What `step` returned."""

    call: int
    result: Any
    """A `StepResult` with an empty `info`; checked where it is received."""
    max_turn_tokens: int | None = None
    """Longest next turn of the policy."""


class Restored(msgspec.Struct, frozen=True, tag=True):
    """The session is where it was before that turn."""

    call: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The environment gave no answer; its session is over, unless it continues."""

    call: int
    reason: FailureReason
    message: str
    continues: bool = False
    """It was a step of an environment with `restore`: the session can go back to before it."""
    hanging: int = 0
    """See `Hanging`."""


class Hanging(msgspec.Struct, frozen=True, tag=True):
    """Threads were left behind, or have ended since. Answers nothing."""

    threads: int
    """Of the process, that are still in the user's code although nobody waits for them."""


Call = Open | Step | Restore
Answer = Opened | Stepped | Restored | Failed
ToWorker = Setup | Call | Close
