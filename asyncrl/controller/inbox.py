"""Handles the messages of generators, the trainer and relays."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.controller.live_settings import LiveSettings
from asyncrl.controller.policy_watch import PolicyWatch
from asyncrl.controller.progress import Progress
from asyncrl.controller.trainer_restarts import TrainerRestarts
from asyncrl.controller.training import Training
from asyncrl.controller.unfinished_work import SampleHandover, UnfinishedWork
from asyncrl.errors import UserError
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.fleet.condition_wait import ConditionWait
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import GeneratorWorker, RelayWorker, TrainerRank, Worker
from asyncrl.runs.directory import RunDirectory
from asyncrl.scheduler import events
from asyncrl.scheduler.errors import ImpossibleEvent, SenderOutOfStep
from asyncrl.trainer.checkpoint.format.files import newest_complete
from asyncrl.wire.messages import from_generator, from_relay, from_trainer
from asyncrl.wire.messages.from_generator import GeneratorReady, SampleFailed, WeightsInstalled
from asyncrl.wire.messages.from_trainer import CheckpointFailed, CheckpointWritten, DeliveryRefused
from asyncrl.wire.records.step import EngineStats
from asyncrl.wire.transport.decoding import Reason

logger = logging.getLogger(__name__)

Message = from_generator.FromGenerator | from_trainer.FromTrainer | from_relay.FromRelay
_Failure = from_generator.Failure | from_trainer.Failure | from_relay.Failure
_Goodbye = from_generator.Goodbye | from_trainer.Goodbye | from_relay.Goodbye
_Finding = from_generator.WrongPolicyFound | from_trainer.WrongPolicyFound
FROM_THE_LOST = (
    from_generator.SampleDelivered | from_trainer.StepFinished | _Finding | _Failure | _Goodbye
)
"""Messages that count after their sender is lost: why it ended, what it had done. All others are
dropped: on another node the process may live on for a while."""
_Handlers = dict[type, Callable[[Any, Any], Awaitable[None] | None]]
"""The handler of each type of message; it gets the sender and the message."""

BURST = 8
PACE_SECONDS = 1.0
ROW_SECONDS = 40.0
"""Row-seconds over which a speed is averaged: 5 s of 8 running samples (or of all, if fewer)."""


class PacedWrites:
    """Writes at once, or a second later with further changes, since a write blocks the loop."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._written = 0
        self._is_due = False

    def __call__(self) -> None:
        """Write the present state soon. Called in an event loop."""
        if self._written == BURST:
            self._is_due = True
            return
        if self._written == 0:
            asyncio.get_running_loop().call_later(PACE_SECONDS, self._begin_again)
        self._written += 1
        self._write()

    def _begin_again(self) -> None:
        self._written = 0
        if self._is_due:
            self._is_due = False
            self()


class CheckpointRecord:
    """Reports once when checkpoints begin to fail, per cause, and once when they succeed again."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self.listeners: list[Callable[[CheckpointWritten | CheckpointFailed], None]] = []
        self._failed: CheckpointFailed | None = None

    def written(self, message: CheckpointWritten) -> None:
        """Record a written checkpoint."""
        if self._failed is not None:
            self._say(f"checkpoints can be written now: {message.path}")
        self._failed = None
        for listener in self.listeners:
            listener(message)

    def failed(self, message: CheckpointFailed) -> None:
        """Record a checkpoint that the disk refused."""
        if self._failed is None or self._failed.cause != message.cause:
            self._say(
                f"{message.reason}. Training continues; the next attempt is after step "
                f"{message.retry_version} or at the end of the run; {self._newest()}"
            )
        self._failed = message
        for listener in self.listeners:
            listener(message)

    def missing(self, steps: int) -> str | None:
        """Return why the state after `steps` steps is not saved; None if it is, or for 0 steps."""
        newest = newest_complete(self._directory)
        if steps == 0 or (newest is not None and newest >= steps):
            return None
        why = "the trainer ended without saving it; see logs/trainer.log"
        if self._failed is not None:
            why = self._failed.reason
        place = "from the first step" if newest is None else "from there"
        return (
            f"the last state of the run, after step {steps}, is not saved: {why}; "
            f"{self._newest()}. Once checkpoints can be written, continue {place} with --resume"
        )

    def _newest(self) -> str:
        newest = newest_complete(self._directory)
        if newest is None:
            return "there is no checkpoint yet"
        return f"the newest checkpoint is that of step {newest}"


@dataclass(slots=True)
class _Generator:
    stats: EngineStats
    reported: float
    tokens: int = 0
    row_seconds: float = 0.0
    is_warm: bool = False


class SpeedMeter:
    """Tokens per second of each running sample, by generator.

    The scheduler smooths them (`scheduler.placement`). Time without generation does not count. A
    generator's first average is dropped, because engines compile and fill caches then.
    """

    def __init__(self) -> None:
        self._generators: dict[str, _Generator] = {}

    def reported(self, generator: str, stats: EngineStats, now: float) -> float | None:
        """Take a report with engine counters at `now`; return the generator's new speed, if any."""
        known = self._generators.get(generator)
        if known is None:
            self._generators[generator] = _Generator(stats, now)
            return None
        tokens = stats.tokens.generated - known.stats.tokens.generated
        rows = (stats.running + known.stats.running) / 2
        if tokens > 0 and rows > 0:
            known.tokens += tokens
            known.row_seconds += rows * (now - known.reported)
        known.stats, known.reported = stats, now
        if known.row_seconds < min(ROW_SECONDS, 5.0 * max(1, stats.slots)):
            return None
        average = known.tokens / known.row_seconds
        known.tokens, known.row_seconds = 0, 0.0
        was_warm, known.is_warm = known.is_warm, True
        return average if was_warm else None


@dataclass(eq=False)
class Inbox:
    """Updates the sender's `Worker` and passes messages on to scheduler and evaluation."""

    _directory: RunDirectory
    _fleet: Fleet
    _training: Training
    _evaluation: FleetEvaluation
    _progress: Progress
    _waiter: ConditionWait
    _trainer_restarts: TrainerRestarts
    _checkpoints: CheckpointRecord
    _unfinished: UnfinishedWork
    _policy_watch: PolicyWatch
    _moves: SampleHandover
    _settings: LiveSettings

    def __post_init__(self) -> None:
        self._speeds = SpeedMeter()
        self._moving: set[asyncio.Task[None]] = set()
        self._write_state = PacedWrites(self._directory.write_state)
        fleet, training, evaluation = self._fleet, self._training, self._evaluation
        policy_watch, checkpoints = self._policy_watch, self._checkpoints
        self._of_generators: _Handlers = {
            GeneratorReady: self._generator_ready,
            from_generator.SampleFinished: lambda worker, message: training.sample_finished(
                worker.name, message
            ),
            from_generator.SampleRewarded: lambda worker, message: training.sample_rewarded(
                worker.name, message
            ),
            SampleFailed: self._sample_failed,
            from_generator.SampleDelivered: lambda worker, message: training.apply(
                events.SampleDelivered(worker.name, message.sample)
            ),
            from_generator.EvaluationSample: evaluation.returned,
            from_generator.EvaluationMissed: evaluation.missed,
            WeightsInstalled: self._weights_installed,
            from_generator.WrongPolicyFound: lambda _, message: policy_watch.found(message.found),
            from_generator.Rescored: lambda worker, message: policy_watch.rescored(
                worker.name, message
            ),
            from_generator.Rewound: self._rewound,
            from_generator.Released: self._released,
            from_generator.GeneratorReport: self._generator_report,
            from_generator.Failure: self._failure,
            from_generator.Goodbye: _goodbye,
        }
        self._of_trainer: _Handlers = {
            from_trainer.TrainerReady: self._trainer_ready,
            from_trainer.StepFinished: self._step_finished,
            CheckpointWritten: self._checkpoint_written,
            CheckpointFailed: lambda _, message: checkpoints.failed(message),
            from_trainer.TrainerReport: self._trainer_report,
            DeliveryRefused: self._delivery_refused,
            from_trainer.PeerCutOff: lambda worker, message: fleet.cut_off(
                message.generator, f"{message.reason} (noticed by {worker.name})"
            ),
            from_trainer.WrongPolicyFound: lambda _, message: policy_watch.suspected(message),
            from_trainer.Failure: self._failure,
            from_trainer.Goodbye: _goodbye,
        }
        self._of_relays: _Handlers = {
            from_relay.RelayReady: self._relay_ready,
            from_relay.WeightsHere: fleet.installations.arrived,
            from_relay.WeightsFailed: fleet.installations.failed,
            from_relay.WeightsChecked: fleet.installations.checked,
            from_relay.RelayReport: lambda worker, message: logger.debug(
                "%s has sent %d bytes of weights", worker.name, message.sent_bytes
            ),
            from_relay.FileHere: lambda _, message: fleet.files.answered(message),
            from_relay.FileMissing: lambda _, message: fleet.files.answered(message),
            from_relay.Failure: self._failure,
            from_relay.Goodbye: _goodbye,
        }

    async def handle(self, sender: str, message: Message) -> None:
        """Handle one message; refuse an invalid one, and kill a sender that cannot continue."""
        kind, worker = type(message).__name__, self._fleet.heard_from(sender)
        if worker is None:
            self._fleet.refuse(sender, Reason.UNKNOWN_PEER, f"{kind} from an unknown process")
            return
        if worker.is_gone and not isinstance(message, FROM_THE_LOST):
            logger.info("dropped %s of %s: it arrived after the loss of that process", kind, sender)
            return
        handlers = self._of_relays
        if isinstance(worker, GeneratorWorker | TrainerRank):
            of_generator = isinstance(worker, GeneratorWorker)
            handlers = self._of_generators if of_generator else self._of_trainer
        handler = handlers.get(type(message))
        if handler is None:
            self._fleet.refuse(sender, Reason.UNEXPECTED, f"a process of its role sends no {kind}")
            return
        try:
            if (handling := handler(worker, message)) is not None:
                await handling
        except ImpossibleEvent as error:
            self._fleet.refuse(sender, Reason.IMPOSSIBLE_EVENT, str(error))
            if isinstance(error, SenderOutOfStep):
                self._fleet.cut_off(sender, f"its {kind} contradicts the run: {error}")
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            logger.exception("%s of %s could not be handled", kind, sender)
            self._fleet.refuse(sender, Reason.IMPOSSIBLE_EVENT, f"{type(error).__name__}: {error}")
            self._fleet.cut_off(sender, f"its {kind} could not be handled: {error}")
        self._waiter.notify()

    async def _generator_ready(self, worker: GeneratorWorker, message: GeneratorReady) -> None:
        worker.ready(message.policy_version, message.slots, message.metrics_port)
        self._policy_watch.generator_ready(worker, message.fingerprint)
        await self._settings.tell_generator(worker.name)
        self._write_ports()
        if self._training.has_begun and not worker.is_leaving:
            self._progress.say(f"{worker.name} has joined")
        if worker.is_leaving:  # its end was ordered before it was ready
            return
        if self._training.has_begun:  # then the scheduler decides when it gets new weights
            joined = events.GeneratorJoined(worker.name, worker.slots, worker.policy_version)
            await self._training.apply(joined)
        else:
            await self._evaluation.update(worker)
        await self._evaluation.fill(worker)

    def _write_ports(self) -> None:
        targets = self._fleet.metrics_targets()
        self._directory.state.metrics_ports = {name: one.port for name, one in targets.items()}
        self._write_state()

    async def _sample_failed(self, worker: GeneratorWorker, message: SampleFailed) -> None:
        if message.user_error:
            self._waiter.fail(UserError(message.reason))
        else:
            event = events.SampleFailed(worker.name, message.sample, message.reason)
            await self._training.apply(event)

    async def _weights_installed(self, worker: GeneratorWorker, message: WeightsInstalled) -> None:
        if not self._fleet.installations.is_answered(worker, message.policy_version):
            return  # it will be sent again
        worker.policy_version = message.policy_version
        self._progress.installed(worker.name, message.policy_version)
        weights = self._fleet.weights
        if weights is not None and message.policy_version < weights.policy_version:
            self._fleet.installations.check(self._fleet.trainer)
        await self._training.apply(events.WeightsInstalled(worker.name, message.policy_version))
        await self._evaluation.fill(worker)

    async def _rewound(self, worker: GeneratorWorker, message: from_generator.Rewound) -> None:
        worker.policy_version = message.policy_version
        await self._training.apply(
            events.GeneratorRewound(worker.name, message.lineage, message.policy_version)
        )

    def _released(self, worker: GeneratorWorker, message: from_generator.Released) -> None:
        task = asyncio.create_task(self._move(worker, message))
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    async def _move(self, worker: GeneratorWorker, message: from_generator.Released) -> None:
        try:
            await self._moves.take(worker.name, message, is_lost=lambda: worker.is_gone)
            await self._training.apply(events.SamplesReleased(worker.name))
        except Exception as error:  # noqa: BLE001 - raised again in the phase that waits
            self._waiter.fail(error)

    async def _generator_report(
        self, worker: GeneratorWorker, message: from_generator.GeneratorReport
    ) -> None:
        worker.report, worker.reported = message, time.monotonic()
        await self._training.apply(events.KvUsed(worker.name, message.engine.kv_used))
        waiting = events.EnvironmentWaits(worker.name, message.in_environments)
        await self._training.apply(waiting)
        speed = self._speeds.reported(worker.name, message.engine, worker.reported)
        if speed is not None:
            await self._training.apply(events.SpeedMeasured(worker.name, speed))

    async def _trainer_ready(self, worker: TrainerRank, message: from_trainer.TrainerReady) -> None:
        worker.weights, worker.data_address = message.manifest, message.data_address
        worker.ready_message = message
        ranks = self._fleet.ranks
        if not any(one is worker for one in ranks):
            ranks = [worker]
        said = [one.ready_message for one in ranks if one.ready_message is not None]
        if len(said) < len(ranks):
            return
        for one, ready in zip(ranks, said, strict=True):
            one.ready(ready.policy_version, ready.metrics_port)
        self._write_ports()
        worker, message = ranks[0], said[0]
        if worker is self._fleet.trainer:
            self._fleet.look_after_weights()
            self._policy_watch.compare()
            await self._settings.tell_trainer()
            await self._trainer_restarts.ready(worker, message.initial_weights)

    async def _step_finished(self, worker: TrainerRank, message: from_trainer.StepFinished) -> None:
        if self._fleet.trainer is not worker and self._fleet.trainer.is_ready:
            return  # its replacement continues, perhaps from a checkpoint before this step
        version = message.manifest.policy_version
        worker.weights, worker.policy_version = message.manifest, version
        self._fleet.look_after_weights()
        await self._training.apply(events.WeightsPublished(version))
        self._training.trained_steps = version
        self._progress.step_finished(message)
        await self._training.step_finished(message)
        await self._evaluation.published(version)

    async def _checkpoint_written(self, worker: TrainerRank, message: CheckpointWritten) -> None:
        logger.info("%s wrote checkpoint %d: %s", worker.name, message.policy_version, message.path)
        self._checkpoints.written(message)
        if self._training.is_running and worker is self._fleet.trainer:
            newest, first = self._training.trained_steps, self._training.first_unreached_group
            await self._unfinished.save(message.policy_version, published=newest, first_group=first)

    def _trainer_report(self, worker: TrainerRank, message: from_trainer.TrainerReport) -> None:
        worker.report = message
        if worker is not self._fleet.trainer:  # which says when a step is finished
            worker.policy_version = message.policy_version

    async def _delivery_refused(self, worker: TrainerRank, message: DeliveryRefused) -> None:
        reason = f"{worker.name} refused its delivery: {message.reason}"
        await self._training.apply(events.SampleFailed(message.generator, message.sample, reason))

    def _relay_ready(self, worker: RelayWorker, message: from_relay.RelayReady) -> None:
        worker.ready(message)
        self._write_ports()
        self._fleet.look_after_weights()

    def _failure(self, worker: Worker, message: _Failure) -> None:
        """Note why a process ends. A user's mistake ends the run; the watchdog does the rest."""
        worker.reason = message.reason
        if message.user_error:
            self._waiter.fail(UserError(message.reason))


def _goodbye(worker: Worker, message: Message) -> None:
    logger.info("%s: %s", worker.name, type(message).__name__)
