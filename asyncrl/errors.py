"""Errors of asyncrl itself, by who can fix them.

AsyncrlError                  exit code 1: the run failed
├── UserError                 exit code 2: the user must change something
│   ├── ConfigError           a configuration key or value
│   ├── DataError             a dataset: a missing file, an example without the field, no example
│   ├── ModelError            a model directory or id that cannot be used
│   ├── RenderingError        messages that the model's chat template refuses
│   └── RewardError           a reward function, named with the prompt that it was scoring
│       └── RewardFailed      it raised, lost its process, or returned no finite number
│           └── RewardTimeout it did not return in time
├── RunFailed                 a process died for good, or nothing could be trained
│   └── WrongPolicyError      a generator samples from another policy than the one trained
├── Interrupted               exit code 130: the user ended the run at once, by a second Ctrl-C
└── WaitTimeout               a wait exceeded its limit; says what was waited for

A message is one paragraph: what was wrong, where, and what to do. The command line prints it
without a traceback and exits with `exit_code`. Errors of the other packages (EngineError,
TrainerError, ...) form separate trees in those packages.
"""

from typing import ClassVar


class AsyncrlError(Exception):
    """Base of asyncrl's own errors."""

    exit_code: ClassVar[int] = 1


class UserError(AsyncrlError):
    """The user must change something; the message says what."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A configuration key is unknown, or a value is impossible."""


class DataError(UserError):
    """A dataset cannot be used; the message names the file and the line."""


class ModelError(UserError):
    """A model cannot be used; the message names the path and what it lacks."""


class RenderingError(UserError):
    """The chat template of the model refuses a conversation."""


class RewardError(UserError):
    """A reward function cannot be used or failed."""


class RewardFailed(RewardError):  # noqa: N818 - says what happened
    """A reward function gave no reward for a response."""

    def __init__(
        self, message: str, *, function: str = "", reason: str = "raised", unscored: bool = False
    ) -> None:
        super().__init__(message)
        self.function = function
        """Label of the function (`RewardConfig.labels`)."""
        self.reason = reason
        """One of `asyncrl.rewards.protocol.FailureReason`."""
        self.unscored = unscored
        """True if the response is not at fault (a server is down, say): a held-out sample is then
        left out of the accuracy (docs/decisions/0086)."""


class RewardTimeout(RewardFailed):
    """A reward function did not return in time."""

    def __init__(self, message: str, *, function: str = "", unscored: bool = False) -> None:
        super().__init__(message, function=function, reason="timeout", unscored=unscored)


class RunFailed(AsyncrlError):  # noqa: N818 - says what happened
    """The run cannot continue. Everything up to its last checkpoint is kept."""


class WrongPolicyError(RunFailed):
    """A generator samples from another policy than it says, and `run.on_wrong_policy` is stop."""


class Interrupted(AsyncrlError):  # noqa: N818 - says what happened
    """A second Ctrl-C, SIGTERM or SIGHUP ended the run at once; it can be resumed."""

    exit_code: ClassVar[int] = 130

    def __init__(self) -> None:
        super().__init__(
            "ended at once by a second signal; what was trained since the newest checkpoint is "
            "trained again after --resume"
        )


class WaitTimeout(AsyncrlError):  # noqa: N818 - says what happened
    """A wait exceeded its limit; the message names what was waited for."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group that is not a group itself: why a TaskGroup failed."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
