"""The controller of a run: event loops between generators, trainer, scheduler and user.

              prompts ──┐                       ┌── InstallWeights ◄── StepFinished ──┐
                        ▼                       ▼                                     │
    scheduler ─► Generate ─► generators ─► SampleFinished ─► scheduler ─► Deliver     │
                                 │                                                    │
                                 └──────────── trajectories (data plane) ─────────► trainer

pump      consumes:      messages from every process
          produces:      scheduler events, whose commands become messages to the processes
          waits for:     the next message
          unblocked by:  any process
          bounded by:    watch, which kills processes that stay silent
          code:          inbox, training, commands

watch     consumes:      exit codes, and the time of each process's last message
          produces:      GeneratorLost events, replacements, RunFailed
          waits for:     the clock
          bounded by:    WATCH_SECONDS
          code:          watchdog, fleet

show      consumes:      reports of the processes, a snapshot of the scheduler
          produces:      the live view
          waits for:     the clock
          bounded by:    SHOW_SECONDS
          code:          progress

phases    consumes:      what pump and watch changed
          produces:      the accuracy before, trained steps, the accuracy after
          waits for:     a condition; errors name it
          unblocked by:  ConditionWait.notify, after every message and every death
          bounded by:    a time limit per condition; training by watch, which ends the run when
                         nothing is left that training could wait for
          code:          evaluation, training, waiting

An error in a loop goes to `ConditionWait.fail`, which raises it in the phase that waits.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.controller.group_traces import GroupTraces
from asyncrl.controller.inbox import CheckpointRecord, Inbox, Message
from asyncrl.controller.live_settings import LiveSettings
from asyncrl.controller.policy_watch import PolicyWatch
from asyncrl.controller.progress import Progress
from asyncrl.controller.scaling import Scaling, arrivals_of
from asyncrl.controller.trainer_restarts import TrainerRestarts
from asyncrl.controller.training import Training
from asyncrl.controller.unfinished_work import SampleHandover, UnfinishedWork
from asyncrl.controller.user_requests import UserRequests
from asyncrl.controller.watchdog import Watchdog
from asyncrl.evaluation.during import EvaluationDuringTraining
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.evaluation.results import EvaluationResults
from asyncrl.evaluation.round import Accuracy
from asyncrl.fleet.condition_wait import ConditionWait
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.launch.agents.launcher import AgentsLauncher
from asyncrl.runs.directory import RunDirectory
from asyncrl.scheduler import events
from asyncrl.scheduler.run_ahead import RunAhead
from asyncrl.steering.status_stream import status_reply, view_reply
from asyncrl.tasks.prompts import Task
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire import Hub
from asyncrl.wire.messages import control, from_trainer
from asyncrl.wire.records.evaluations import EvaluationRecord

WATCH_SECONDS = 0.2
SHOW_SECONDS = 0.25
LAST_MESSAGE_SECONDS = 0.2
REWARD_SECONDS = 20.0
"""A run that stops waits this long for the next reward of its step, which it then gives up: the
function may hang, and what ended the run may not wait longer (Kubernetes: 30 s)."""


@dataclass(slots=True)
class RewardPatience:
    """Measures how long a stopping run has waited for nothing but rewards."""

    _unrewarded: int = 0
    _since: float = 0.0

    def is_over(self, unrewarded: int, now: float) -> bool:
        """Return True if no reward has come for too long; `unrewarded` samples lack nothing else.

        >>> patience = RewardPatience()
        >>> [patience.is_over(left, now) for left, now in ((2, 0), (1, 15), (1, 30), (1, 35))]
        [False, False, False, True]
        """
        if unrewarded != self._unrewarded:
            self._unrewarded, self._since = unrewarded, now
        return unrewarded > 0 and now - self._since >= REWARD_SECONDS


class Controller:
    """Carries a run from the start of its processes to its last evaluation."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        *,
        directory: RunDirectory,
        fleet: Fleet,
        hub: Hub[Message],
        progress: Progress,
        traces: GroupTraces | None = None,
        agents: AgentsLauncher | None = None,
        shares_processors: bool = False,
    ) -> None:
        self._config = config
        self._directory = directory
        self._fleet = fleet
        self._hub = hub
        self._progress = progress
        waiter = self._waiter = ConditionWait()
        requests = SampleRequests(task, config.run.seed, directory.state.start)
        results = self._results = EvaluationResults(directory.path, config.evaluation)
        progress.evaluations = results
        say, path = progress.say, directory.path
        during = EvaluationDuringTraining(
            config, requests, fleet, say=say, result=self._evaluated, given_up=self._given_up
        )
        evaluation = self._evaluation = FleetEvaluation(
            config.evaluation, requests, fleet=fleet, waiter=waiter, during=during, results=results
        )
        self._moves = SampleHandover(config, path, requests, say, fleet.files)
        per_step = config.scheduler.groups_per_step
        ahead = RunAhead(shares_processors, per_step, progress.run_ahead_before)
        training = Training(config, requests, fleet, progress, waiter, self._moves, ahead, traces)
        training.trained_steps = directory.resume_point.step
        self._training = training
        self._checkpoints = CheckpointRecord(path / "checkpoints", say)
        self._unfinished = UnfinishedWork(config, path, fleet, requests, say)
        phases = training, evaluation
        self._settings = LiveSettings(config, directory, fleet, *phases, self._unfinished)
        self.accuracy_before: Accuracy | None = None
        self.has_begun = False
        """True once all processes were ready, so that it evaluates or trains."""
        self._patience: RewardPatience | None = None
        """Set by a stop, and not by a drain."""
        self._evaluations = 0
        """Evaluations begun after training: one, unless steps were lost since."""
        restarts = TrainerRestarts(config, directory, fleet, *phases, progress, waiter)
        watch = PolicyWatch(config.run.on_wrong_policy, fleet, progress, waiter)
        own = restarts, self._checkpoints, self._unfinished, watch, self._moves, self._settings
        self._inbox = Inbox(directory, fleet, training, evaluation, progress, waiter, *own)
        scaling = Scaling(fleet, *phases)
        self._requests = UserRequests(
            directory, fleet, training, waiter, self._settings, scaling, self._status, self.stop
        )
        self._checkpoints.listeners.append(self._requests.checkpoint_ended)
        why_closed = self._requests.why_no_order
        arrivals = arrivals_of(agents, fleet, scaling, path, why_closed, say)
        self._watchdog = Watchdog(fleet, restarts, *phases, progress, arrivals)

    @property
    def is_complete(self) -> bool:
        """True if every step of the run is trained."""
        return self._training.is_complete

    async def run(self) -> tuple[Accuracy | None, Accuracy | None]:
        """Evaluate, train, evaluate; return both accuracies, the last None if training stopped.

        Raises RunFailed if a process died for good or nothing could be trained; UserError if the
        reward, a prompt or the model is at fault; WaitTimeout if a start or evaluation is too slow.
        """
        parts = self._pump, self._watch, self._show
        loops = [asyncio.create_task(self._guarded(loop)) for loop in parts]
        try:
            self._fleet.start_all()
            await self._waiter.until(
                lambda: self._fleet.all_ready or self._waiter.stop_requested,
                seconds=self._config.launcher.startup_seconds,
                what=self._fleet.what_starts,
            )
            self.has_begun = True
            before = await self._evaluate_before()
            if self._directory.resume_point.directory is not None:
                await self._unfinished.restore(self._directory.resume_point.step)
            if not self.is_complete:
                await self._evaluation.training_begins(self._training.trained_steps)
            return before, await self._train_and_evaluate()
        finally:
            for loop in loops:
                loop.cancel()
            self._evaluation.end()

    async def unsaved(self) -> str | None:
        """Return why the last state is not saved, or None, once all processes have ended."""
        self._moves.remove_files()
        if self._checkpoints.missing(self._training.trained_steps) is None:
            return None
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(LAST_MESSAGE_SECONDS):
                    message = (await self._hub.receive())[1]
                if isinstance(message, from_trainer.CheckpointFailed):
                    self._checkpoints.failed(message)
        return self._checkpoints.missing(self._training.trained_steps)

    async def stop(self, *, drain: bool = False) -> None:
        """Finish the current step, or all begun steps with `drain`, then end the run."""
        self._waiter.stop_requested = True
        if not drain and self._patience is None:  # a second order does not wait anew
            self._patience = RewardPatience()
        self._progress.stopping = True
        await self._training.apply(events.DrainRequested() if drain else events.StopRequested())
        self._waiter.notify()

    def fail(self, error: Exception) -> None:
        """End the run with this error, in whatever phase it is."""
        self._waiter.fail(error)

    async def answer(self, request: control.Request) -> control.Reply | msgspec.Raw:
        """Execute a user's request."""
        return await self._requests.answer(request)

    def view(self) -> control.ViewReply:
        """Return the view of watching clients."""
        return view_reply(self._progress.view(self._fleet, self._evaluation.current))

    def _status(self) -> control.StatusReply:
        view = self._progress.view(self._fleet, self._evaluation.current)
        return status_reply(self._config, self._fleet, view)

    def _evaluated(self, record: EvaluationRecord) -> None:
        self._results.add(record)
        best = self._results.best
        self._progress.evaluated(record, is_best=best is not None and best.step == record.step)

    def _given_up(self, step: int) -> None:
        self._results.settled(step)
        self._progress.evaluation_given_up()

    async def _evaluate_before(self) -> Accuracy | None:
        state = self._directory.state
        if not state.comparable:
            return None
        known = self._results.before if self._training.trained_steps else None
        if state.accuracy_before is not None:
            known = self._results.began_with(state.accuracy_before, state.evaluation_samples)
        if known is not None:  # even if this is incomplete, the model before training is gone
            accuracy = Accuracy.of(known)
            self._progress.evaluated(known, is_known=True)
        else:
            begins = self._config.evaluation.at_start and not self._training.trained_steps
            measured = await self._evaluation.measure(0) if begins else None
            if measured is None:
                return None
            accuracy = Accuracy.of(measured)
            state.accuracy_before = accuracy.value
            state.evaluation_samples = accuracy.samples
            self._directory.write_state()
            self._evaluated(measured)
        self.accuracy_before = accuracy
        return accuracy

    async def _train_and_evaluate(self) -> Accuracy | None:
        while True:
            await self._training.run()
            after = await self._evaluate_after() if self.is_complete else None
            if not self._training.has_steps_left:
                return after
            # Steps were lost with the trainer during the evaluation: train them again.

    async def _evaluate_after(self) -> Accuracy | None:
        version, generators = self._training.trained_steps, self._fleet.generators

        def changed() -> bool:
            return self._waiter.stop_requested or self._training.has_steps_left

        await self._training.trainer_is_ready(changed)
        await self._evaluation.bring_to(version)
        await self._waiter.until(
            lambda: changed() or all(one.policy_version >= version for one in generators()),
            seconds=self._config.launcher.startup_seconds,
            what=lambda: f"the generators to install version {version}",
        )
        self._evaluations += 1
        measured = None if changed() else await self._evaluation.measure(self._evaluations)
        if measured is None:
            return None
        self._evaluated(measured)
        return Accuracy.of(measured)

    async def _guarded(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Run a loop; if it breaks, the run ends with its error."""
        try:
            await loop()
        except Exception as error:  # noqa: BLE001 - raised again in the phase that waits
            self._waiter.fail(error)

    async def _pump(self) -> None:
        while True:
            sender, message = await self._hub.receive()
            await self._inbox.handle(sender, message)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if await self._watchdog.check():
                self._waiter.notify()
            if self._patience is not None:
                number, reason = self._progress.unrewarded()
                if self._patience.is_over(number, time.monotonic()):
                    await self._training.apply(events.StepGivenUp(reason))

    async def _show(self) -> None:
        while True:
            self._progress.show(self._fleet, self._evaluation.current)
            await asyncio.sleep(SHOW_SECONDS)
