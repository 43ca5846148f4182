"""The user's requests: pause, resume, stop."""

from __future__ import annotations

from asyncrl.scheduler import commands, events
from asyncrl.scheduler.commands import RunOutcome
from asyncrl.scheduler.ledger import Ledger
from asyncrl.scheduler.sample_transitions import Work
from asyncrl.scheduler.state import SchedulerState
from asyncrl.scheduler.steps import Steps
from asyncrl.scheduler.weights import Weights


class RunControl:
    """Pauses, resumes and stops a run; `asyncrl.scheduler.scheduler` describes what a stop does."""

    def __init__(self, state: SchedulerState, work: Work, steps: Steps, weights: Weights) -> None:
        self._state = state
        self._work = work
        self._steps = steps
        self._weights = weights

    def on_pause(self, _: events.PauseRequested) -> None:
        """Pause every generator."""
        state = self._state
        if state.paused or state.finished is not None:
            return
        state.paused = True
        state.commands.extend(commands.PauseGenerator(name) for name in state.generators)

    def on_resume(self, _: events.ResumeRequested) -> None:
        """Resume every generator and start samples in its free slots."""
        self._resume()

    def on_stop(self, _: events.StopRequested) -> None:
        """Withdraw the steps that need not be trained, and finish the current one."""
        state = self._state
        last = max(state.step, state.next_undeclared - 1)
        if state.finished is None and (not state.stopping or last < state.last_step):
            self._end_after(last)

    def on_drain(self, _: events.DrainRequested) -> None:
        """Withdraw groups that are not begun or do not fill a step, and finish the rest."""
        state = self._state
        if not state.stopping and state.finished is None:
            self._end_after(state.last_begun_step)

    def _end_after(self, last: int) -> None:
        """Train up to this step, unless nothing of it is begun, and end."""
        state = self._state
        state.stopping = True
        if not state.trainer_joined or last < state.step:
            self._steps.end_run(RunOutcome.STOPPED)
            return
        state.last_step = last
        self._withdraw_after(last)
        settled = sum(state.ledger.progress(state.step))
        if not settled and all(group.untouched for group in state.groups.values()):
            self._steps.end_run(RunOutcome.STOPPED)
            return
        self._resume()
        for generator in list(state.generators.values()):
            self._weights.refill(generator)
        self.end_if_stuck()

    def _withdraw_after(self, last: int) -> None:
        """Withdraw the groups of later steps; with dynamic sampling, only those not begun."""
        state, ledger = self._state, self._state.ledger
        if isinstance(ledger, Ledger):
            self._work.discard([group for group in state.groups.values() if group.step > last])
            ledger.withdraw_after(last)
            return
        end = ledger.next_group
        while end > ledger.first_group and (group := state.groups.get(end - 1)) is not None:
            if not group.untouched or group.step <= last:
                break
            end -= 1
        self._work.discard([group for group in state.groups.values() if group.index >= end])
        ledger.withdraw_from(end)
        if state.places is not None:
            state.places.changed = True

    def end_if_stuck(self) -> None:
        """End a stopping run that has no generator left, rather than wait for one to join."""
        state = self._state
        stuck = state.groups and not state.generators
        if state.stopping and state.finished is None and stuck:
            self._steps.end_run(
                RunOutcome.STOPPED,
                f"step {state.step} was not trained, since no generator is left to generate "
                f"{len(state.groups)} of its groups",
            )

    def _resume(self) -> None:
        state = self._state
        if not state.paused:
            return
        state.paused = False
        for generator in list(state.generators.values()):
            state.commands.append(commands.ResumeGenerator(generator.name))
            self._work.start(generator)
