"""Messages between the pool and a worker process of environments: frames on standard streams.

The pool sends one `Setup` and, after the answer, calls: any number at once, but one at a time for a
session. Each is answered by the message opposite or by `Failed`:

    Open ──► Opened        Step ──► Stepped        Restore ──► Restored        Close (no answer)

The worker also sends `Hanging`. Import-light: worker processes load this file.
"""

from typing import Any

import msgspec

from asyncrl.environments.protocol import Action, FailureReason, Traits


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Load the environments' factory."""

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
    """Number of the session, unique within a pool."""
    row: dict[str, Any]
    seed: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Give a session the policy's turn."""

    call: int
    session: int
    action: Action


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Restore the snapshot from before turn number `turn` (from 0), unless that never began."""

    call: int
    session: int
    turn: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """End a session, after the call that it is answering. Without an answer."""

    session: int


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The result of `reset`, and the environment's traits."""

    call: int
    first: Any
    """The receiver checks it."""
    traits: Traits
    max_turn_tokens: int | None = None


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The result of `step`."""

    call: int
    result: Any
    """A `StepResult` with an empty `info`; the receiver checks it."""
    max_turn_tokens: int | None = None


class Restored(msgspec.Struct, frozen=True, tag=True):
    """The session has the state from before that turn."""

    call: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The environment did not answer; its session is over, unless it continues."""

    call: int
    reason: FailureReason
    message: str
    continues: bool = False
    """It was a step of an environment with `restore`: the session can go back to before it."""
    hanging: int = 0
    """See `Hanging`."""


class Hanging(msgspec.Struct, frozen=True, tag=True):
    """The number of the process's threads left behind in the user's code has changed."""

    threads: int


Call = Open | Step | Restore
Answer = Opened | Stepped | Restored | Failed
ToWorker = Setup | Call | Close
