"""Gets the run's status from its controller, or from the folder of an ended run."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import AsyncrlError, UserError
from asyncrl.monitoring.report.data import RunData, load_run
from asyncrl.monitoring.terminal.run_view import RunView
from asyncrl.runs.directory import read_state
from asyncrl.steering.control_socket import ENDINGS, open_line, send_order
from asyncrl.wire import Line
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages import control

ASK_SECONDS = 1.0
"""Minimum interval between requests to the controller, for any number of watchers."""
_REPLY_SECONDS = 5.0

Status = Mapping[str, Any]


class ControllerLink:
    """The controller of an active run, asked over one connection, once a second."""

    takes_orders = True

    def __init__(self, run: Path) -> None:
        self._run = run
        self._line: Line[control.Reply] | None = None
        self._lock = asyncio.Lock()
        self._asked = float("-inf")
        self._status: Status = {}
        self._error: AsyncrlError | None = None

    async def status(self) -> Status:
        """Return `asyncrl status --json` of at most ASK_SECONDS ago. Raises AsyncrlError."""
        async with self._lock:
            if time.monotonic() - self._asked >= ASK_SECONDS:
                try:
                    self._status, self._error = await self._ask(), None
                except (UserError, WireError) as error:
                    self._error = AsyncrlError(str(error))
                self._asked = time.monotonic()
            if self._error is not None:
                raise self._error
            return self._status

    async def order(self, request: control.Request) -> control.Reply:
        """Send an order on a separate connection, so it delays no other. Raises AsyncrlError."""
        try:
            return await send_order(self._run, request)
        except (UserError, WireError) as error:
            raise AsyncrlError(str(error)) from error

    async def _ask(self) -> Status:
        if self._line is None:
            self._line = open_line(self._run)
        try:
            await self._line.send(control.StatusRequest())
            reply = await self._line.receive_within(_REPLY_SECONDS, what="the controller's answer")
        except BaseException:
            # A late reply must not be taken for the answer to the next question.
            self._line.close()
            self._line = None
            raise
        if not isinstance(reply, control.StatusReply):
            raise UserError(f"the controller answered a status request with {reply}")
        return reply.status

    def close(self) -> None:
        """Close the connection."""
        if self._line is not None:
            self._line.close()


class EndedRun:
    """The folder of a run that has ended, read once."""

    takes_orders = False

    def __init__(self, run: Path) -> None:
        self._run = run
        self.data = load_run(run)
        state = read_state(run)
        self.final = status_of(self.data, ENDINGS[None if state is None else state.ended])

    async def status(self) -> Status:
        """Return the final status."""
        return self.final

    async def order(self, request: control.Request) -> control.Reply:
        """Refuse the order."""
        name = type(request).__name__.removesuffix("Request").lower()
        return control.Refused(
            f"the run {self.data.name} {self.final['phase']} and does not take orders ({name})"
        )


Source = ControllerLink | EndedRun


def status_of(data: RunData, phase: str) -> Status:
    """Return the status of an ended run, with the keys of an active one."""
    result, last = data.result, data.steps[-1] if data.steps else None
    exactly = data.on_policy_steps().exactly if result is None else result.exactly_on_policy
    view = RunView(
        phase=phase,
        step=data.steps_done,
        last=last,
        exactly_on_policy=exactly,
        tokens=data.tokens(),
        accuracy_before=data.accuracies()[0],
        evaluation=data.evaluations[-1] if data.evaluations else None,
        best_step=None if result is None else result.best_step,
        best_accuracy=None if result is None else result.best_accuracy,
    )
    status = {
        "run": data.name,
        "steps": data.setting("run.steps"),
        "engine": data.setting("engine.kind"),
        **view.as_status(),
        "processes": {},
    }
    if result is not None:
        status |= {
            "groups_trained": result.groups.trained,
            "groups_failed": result.groups.failed,
            "accuracy_after": result.accuracy_after,
        }
    return status
