"""What the controller tells users of a run: made once in a while, encoded once, for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.monitoring.terminal.run_view import RunView
from asyncrl.wire.messages import control


class EncodedOnce:
    """A reply that is made and encoded at most once in an interval, however many ask.

    Args:
        make: makes it.
        seconds: length of the interval, and the greatest age of what `reply` gives.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        make: Callable[[], control.Reply],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._seconds = seconds
        self._clock = clock
        self._encoded: msgspec.Raw | None = None
        self._made_at = 0.0

    @property
    def seconds_left(self) -> float:
        """Until it is old; 0 if it is, or has never been made."""
        if self._encoded is None:
            return 0.0
        return max(0.0, self._made_at + self._seconds - self._clock())

    def reply(self) -> msgspec.Raw:
        """The same bytes for all who ask in one interval."""
        if self._encoded is None or not self.seconds_left:
            made_at = self._clock()
            self._encoded = msgspec.Raw(msgspec.msgpack.encode(self._make()))
            self._made_at = made_at
        return self._encoded

    def forget(self) -> None:
        """Something has changed that the next one who asks has to see."""
        self._encoded = None


def status_reply(config: RunConfig, fleet: Fleet, view: RunView) -> control.StatusReply:
    """The answer to `asyncrl status`."""
    processes = {
        worker.name: {
            "state": worker.state,
            "policy_version": worker.policy_version,
            "metrics_port": worker.metrics_port,
        }
        for worker in fleet.everyone()
    }
    return control.StatusReply(
        {
            "run": config.run.name,
            "steps": config.run.steps,
            "engine": config.engine_kinds,
            **view.as_status(),
            "processes": processes,
        }
    )


def view_reply(view: RunView) -> control.ViewReply:
    """What `asyncrl watch` is sent."""
    return control.ViewReply(msgspec.to_builtins(view))
