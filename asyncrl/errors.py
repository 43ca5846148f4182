"""What can go wrong above the engines and the trainer, and who can put it right.

AsyncrlError                  exit code 1: the run failed
├── UserError                 exit code 2: something given by the user must be changed
│   ├── ConfigError           a configuration key or value
│   ├── DataError             a dataset: missing file, row without the field, nothing left
│   ├── ModelError            a model directory or id that cannot be used
│   └── RewardError           a reward function, named with the prompt that it was scoring
│       ├── RewardFailed      it raised, or returned something that is not a finite number
│       └── RewardTimeout     it did not return in time; its process was killed
├── ProcessDied               a child process ended by itself; carries its last log lines
└── WaitTimeout               a bounded wait ran out; says what was waited for

Messages are one paragraph: what was wrong, where, and what would be right. The command line
prints them without a traceback and exits with `exit_code`.
"""

from __future__ import annotations

from typing import ClassVar


class AsyncrlError(Exception):
    """Root of what asyncrl raises."""

    exit_code: ClassVar[int] = 1
    """What the command line exits with."""


class UserError(AsyncrlError):
    """The user must change something; the message says what."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A configuration key is unknown, or a value impossible."""


class DataError(UserError):
    """A dataset cannot be used; the message names the file and the line."""


class ModelError(UserError):
    """A model cannot be used; the message names the path and what it lacks."""


class RewardError(UserError):
    """A reward function cannot be used or failed."""


class RewardFailed(RewardError):  # noqa: N818 - says what happened
    """A reward function raised or returned no finite number."""


class RewardTimeout(RewardError):  # noqa: N818 - says what happened
    """A reward function did not return in time; its process was killed and replaced."""


class ProcessDied(AsyncrlError):  # noqa: N818 - says what happened
    """A child process ended by itself."""


class WaitTimeout(AsyncrlError):  # noqa: N818 - says what happened
    """A bounded wait ran out."""
