"""Answers `asyncrl status|stop|pause|resume|drain|checkpoint|...`.

request ──► status: a snapshot, made and encoded at most twice a second for all clients
        └─► order: refused, or executed, recorded and acknowledged with its step
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.controller.live_settings import LiveSettings
from asyncrl.controller.scaling import Scaling
from asyncrl.controller.training import Training
from asyncrl.errors import UserError
from asyncrl.fleet.condition_wait import ConditionWait
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.runs.directory import RunDirectory
from asyncrl.scheduler import events
from asyncrl.scheduler.state import SchedulerState
from asyncrl.steering.status_stream import EncodedOnce
from asyncrl.steering.user_commands import Effect, Orders
from asyncrl.wire.messages import control, from_trainer, to_trainer

STATUS_SECONDS = 0.5
"""A `status` reply younger than this is reused, unless an order came since."""


@dataclass(eq=False)
class UserRequests:
    """Answers the requests of users."""

    _directory: RunDirectory
    _fleet: Fleet
    _training: Training
    _waiter: ConditionWait
    _settings: LiveSettings
    _scaling: Scaling
    _snapshot: Callable[[], control.StatusReply]
    """Makes the `status` reply."""
    _stop_run: Callable[..., Awaitable[None]]
    """Ends the run after the current step; with `drain=True`, after all begun steps."""

    def __post_init__(self) -> None:
        self._status = EncodedOnce(self._snapshot, STATUS_SECONDS)
        self._checkpoint: asyncio.Future[Effect] | None = None
        self._ordered_at = 0
        training, run = self._training, self._directory.path
        self._orders = Orders(run, lambda: training.trained_steps, self.why_no_order)
        self._orders.add(control.StopRequest, self._stop)
        self._orders.add(control.PauseRequest, self._pause)
        self._orders.add(control.ResumeRequest, self._resume)
        self._orders.add(control.DrainRequest, self._drain)
        self._orders.add(control.CheckpointRequest, self._write_checkpoint)
        self._orders.add(control.ScaleRequest, self._scaling.carry_out)
        self._orders.add(control.SetRequest, self._settings.carry_out)

    async def answer(self, request: control.Request) -> control.Reply | msgspec.Raw:
        """Execute a user's request."""
        if isinstance(request, control.StatusRequest):
            return self._status.reply()
        if isinstance(request, control.WatchRequest):
            raise TypeError("a WatchRequest is answered by the audience")
        try:
            return await self._orders.answer(request)
        finally:
            self._status.forget()

    def why_no_order(self, order: control.Request | None = None) -> str | None:
        """Return why an order cannot be executed now, or None."""
        if self._waiter.stop_requested and not (
            isinstance(order, control.StopRequest) and self._training.is_running
        ):
            return "the run is stopping, so it cannot be changed any more"
        if self._training.has_begun and not self._training.has_steps_left:
            return "the run has trained all its steps and is about to end"
        return None

    async def _stop(self, _: control.StopRequest) -> Effect:
        await self._stop_run()
        step = self._training.trained_steps
        return Effect("finishing the current step, then writing a checkpoint", step)

    async def _pause(self, _: control.PauseRequest) -> str:
        if (state := self._state()) is None:
            raise UserError("the run is not training now; only training can pause")
        if state.paused:
            raise UserError("the run is paused already; `asyncrl resume` continues it")
        await self._training.apply(events.PauseRequested())
        return "the generators pause"

    async def _resume(self, _: control.ResumeRequest) -> str:
        if (state := self._state()) is None or not state.paused:
            raise UserError("the run is not paused")
        await self._training.apply(events.ResumeRequested())
        return "the generators continue"

    async def _drain(self, _: control.DrainRequest) -> Effect:
        state = self._state()
        if state is None:
            await self._stop_run()
            return Effect("no step has begun, so the run ends", self._training.trained_steps)
        step, last = state.step, state.last_begun_step
        left_over = state.groups_begun_after(last)
        await self._stop_run(drain=True)
        steps = last - step + 1
        text = "no step has all its groups, so the run ends without training another"
        if steps > 0:
            listed = f"step {last}" if steps == 1 else f"steps {step} to {last}"
            text = f"no new groups are started; training {listed}, then writing a checkpoint"
        if left_over:
            text += (
                f". Left over: {left_over} begun group(s) that do not fill step {last + 1}; they "
                "are generated again when the run is resumed"
            )
        return Effect(text, max(last + 1, step))

    async def _write_checkpoint(self, _: control.CheckpointRequest) -> Effect:
        training, point = self._training, self._directory.resume_point
        if training.trained_steps == (point.step if point.directory is not None else 0):
            where = "it starts from the model" if point.directory is None else str(point.directory)
            raise UserError(
                f"the run has trained no step since it was started, so there is nothing new to "
                f"write ({where})"
            )
        trainer = self._fleet.trainer
        if trainer.state != "ready":
            raise UserError(
                f"{trainer.name} is {trainer.state}, so it cannot write a checkpoint now. Give the "
                "order again when `asyncrl status` shows it as ready"
            )
        self._checkpoint = asyncio.get_running_loop().create_future()
        self._ordered_at = training.trained_steps
        await self._fleet.send_trainer(to_trainer.WriteCheckpoint())
        try:
            while not self._checkpoint.done():
                await asyncio.wait({self._checkpoint}, timeout=1.0)
                if trainer.is_gone:
                    raise UserError(
                        f"{trainer.name} was lost before the checkpoint was written; the run "
                        "continues from the newest whole one"
                    )
            return self._checkpoint.result()
        finally:
            self._checkpoint = None

    def checkpoint_ended(
        self, message: from_trainer.CheckpointWritten | from_trainer.CheckpointFailed
    ) -> None:
        """Take the outcome of the trainer's checkpoint."""
        waiting = self._checkpoint
        if waiting is None or waiting.done() or message.policy_version < self._ordered_at:
            return  # an earlier one was being written when this was ordered
        if isinstance(message, from_trainer.CheckpointFailed):
            waiting.set_exception(UserError(f"{message.reason}. Training continues"))
            return
        step, path = message.policy_version, Path(message.path)
        waiting.set_result(Effect(f"the checkpoint of step {step} is on the disk: {path}", step))

    def _state(self) -> SchedulerState | None:
        scheduler = self._training.scheduler
        return scheduler.state if scheduler is not None and self._training.is_running else None
