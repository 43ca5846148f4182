"""What a run has done so far, in numbers: for the live view, metrics.jsonl, metrics and status."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.evaluation.round import Accuracy, EvaluationRound
from asyncrl.run import warnings as advice
from asyncrl.run.fleet import Fleet
from monitoring.live import LiveView
from monitoring.metrics import ControllerMetrics
from monitoring.metrics_log import MetricsLog
from monitoring.run_view import RunView
from scheduler.scheduler import Scheduler
from wire.messages.from_trainer import StepFinished

RATE_SECONDS = 3.0
"""Shortest time over which rates are taken."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums over all generators that ever were, since this process began."""

    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    """Tokens of older versions that verification kept."""
    rejected: int = 0
    """Tokens of older versions that were written again."""
    busy_seconds: float = 0.0
    """Engine time inside steps, summed over generators."""
    outside: int = 0
    """Tokens that were not among the top K stored with them."""

    def since(self, other: Counters) -> Counters:
        """What was added after `other`."""
        return Counters(
            self.generated - other.generated,
            self.drafted - other.drafted,
            self.accepted - other.accepted,
            self.verified - other.verified,
            self.rejected - other.rejected,
            self.busy_seconds - other.busy_seconds,
            self.outside - other.outside,
        )


def count(fleet: Fleet) -> Counters:
    """Add up the last report of every generator."""
    reports = [w.generator_report for w in fleet.everyone() if w.generator_report is not None]
    return Counters(
        sum(report.engine.tokens.generated for report in reports),
        sum(report.engine.tokens.drafted for report in reports),
        sum(report.engine.tokens.accepted for report in reports),
        sum(report.engine.tokens.verified for report in reports),
        sum(report.engine.tokens.rejected for report in reports),
        sum(report.engine.busy_seconds for report in reports),
        sum(report.engine.tokens.outside_top_k for report in reports),
    )


@dataclass(frozen=True, slots=True)
class Earlier:
    """What the processes before a resume had done."""

    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    rejected: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> Earlier:
        """From the last line of metrics.jsonl."""
        if not rows:
            return cls()
        last = rows[-1]
        return cls(
            int(last.get("tokens_generated", 0)),
            int(last.get("tokens_drafted", 0)),
            int(last.get("tokens_accepted", 0)),
            int(last.get("tokens_verified", 0)),
            int(last.get("tokens_rejected", 0)),
            float(last.get("wall_seconds", 0.0)),
        )


def _waits(metrics: dict[str, float], seconds: float) -> dict[str, float]:
    """The trainer's waits within a step of so many seconds.

    Its first one began with its start, before the training phase, of which it is no part.
    """
    worked = metrics.get("train_seconds", 0.0) + metrics.get("publish_seconds", 0.0)
    waited = min(metrics.get("wait_seconds", 0.0), max(0.0, seconds - worked))
    last = min(metrics.get("wait_last_seconds", 0.0), waited)
    first = min(metrics.get("wait_first_seconds", 0.0), waited - last)
    return {"wait_seconds": waited, "wait_first_seconds": first, "wait_last_seconds": last}


class Progress:
    """Follows a run. Only the controller's event loop calls it."""

    def __init__(
        self,
        config: RunConfig,
        *,
        view: LiveView,
        log: MetricsLog,
        metrics: ControllerMetrics,
        rows: list[dict[str, Any]],
    ) -> None:
        self._config = config
        self._view = view
        self._log = log
        self._metrics = metrics
        self._earlier = Earlier.of(rows)
        self._rewards = deque(
            (float(row["reward_mean"]) for row in rows if "reward_mean" in row), maxlen=200
        )
        self._staleness = [
            (float(row["staleness_mean"]), float(row["staleness_max"]))
            for row in rows
            if "staleness_mean" in row and "staleness_max" in row
        ]
        self._scheduler: Scheduler | None = None
        self._phase = "starting"
        self._before: float | None = None
        self._fleet: Fleet | None = None
        self._began = time.monotonic()
        self._base = Counters()
        self._trained_seconds = 0.0
        self._final: Counters | None = None
        self._last_step_at = self._began
        self._history = deque([(self._began, self._base)])
        self._last_row: dict[str, Any] = {}
        self._steps_here = 0
        self._step = len(rows)
        self.stopping = False
        self._said_outside = self._said_mismatch = False
        for warning in advice.at_start(config):
            self.say(warning)

    # ------------------------------------------------------------ what happened

    def say(self, text: str) -> None:
        """A message for the person who watches."""
        self._view.log(text)

    def decided(self, event: str, seconds: float) -> None:
        """The scheduler dealt with one event of this type."""
        self._metrics.events.of(event).inc()
        self._metrics.event_time.inc(seconds)

    def died(self, role: str) -> None:
        """A process ended by itself."""
        self._metrics.process_failures.of(role).inc()

    def evaluated(self, when: str, accuracy: Accuracy) -> None:
        """An evaluation round is done."""
        if when == "before":
            self._before = accuracy.value
        self._metrics.accuracy.of(when).set(accuracy.value)
        self._view.log(
            f"held-out accuracy {when} training: {accuracy.value:.3f} ± {accuracy.margin:.3f} "
            f"({accuracy.samples} samples, drawn as in training)"
        )

    def training_begins(self, scheduler: Scheduler, first_step: int) -> None:
        """From here on the clock of the training phase runs."""
        self._scheduler = scheduler
        self._phase = "training"
        self._step = first_step
        self._metrics.run.of(self._config.run.name).set(1)
        self._metrics.started.set(time.time())
        self._metrics.steps_planned.set(self._config.run.steps)
        self._began = self._last_step_at = time.monotonic()
        if self._fleet is not None:
            self._base = count(self._fleet)
        self._history = deque([(self._began, self._base)])

    def training_ends(self) -> None:
        """Freeze the totals: what follows is evaluation."""
        self._trained_seconds = time.monotonic() - self._began
        if self._fleet is not None:
            self._final = count(self._fleet).since(self._base)
        self._phase = "training is over"

    def step_finished(self, message: StepFinished) -> None:
        """An optimizer step is done: write its line."""
        now = time.monotonic()
        seconds = max(1e-9, now - self._last_step_at)
        counters = count(self._fleet) if self._fleet is not None else Counters()
        new, window = self._recent(now, counters)
        total = counters.since(self._base)
        generators = max(1, len(self._fleet.generators()) if self._fleet is not None else 1)
        self._step, self._steps_here = message.step + 1, self._steps_here + 1
        row: dict[str, Any] = {
            "step": message.step,
            "time": time.time(),
            "wall_seconds": self._earlier.seconds + now - self._began,
            "step_seconds": seconds,
            **message.metrics,
            **_waits(message.metrics, seconds),
            # Of tokens drawn under the very policy that trains on them; a step may have none.
            "mismatch_abs_mean": message.metrics.get("mismatch_fresh") or None,
            "tokens_generated": self._earlier.generated + total.generated,
            "tokens_drafted": self._earlier.drafted + total.drafted,
            "tokens_accepted": self._earlier.accepted + total.accepted,
            "tokens_verified": self._earlier.verified + total.verified,
            "tokens_rejected": self._earlier.rejected + total.rejected,
            "engine_busy_seconds": total.busy_seconds,
            "tokens_per_second": new.generated / window,
            "generator_idle": min(1.0, max(0.0, 1 - new.busy_seconds / window / generators)),
        }
        row["trainer_idle"] = row["wait_seconds"] / seconds
        self._advise(counters, row["mismatch_abs_mean"])
        self._last_step_at, self._last_row = now, row
        self._log.append(row)
        self._rewards.append(float(row.get("reward_mean", 0.0)))
        self._staleness.append((row.get("staleness_mean", 0.0), row.get("staleness_max", 0.0)))
        self._metrics.publish(row)
        self._metrics.steps.inc()
        self._metrics.samples_ended.of("trained").inc(
            len(message.groups) * self._config.scheduler.group_size
        )
        self._metrics.step_time.observe(seconds)
        self._metrics.policy_version.set(message.manifest.policy_version)

    def _advise(self, counters: Counters, fresh: float | None) -> None:
        disagrees = advice.engine_disagrees(self._config, fresh)
        if disagrees is not None and not self._said_mismatch:
            self._said_mismatch = True
            self.say(disagrees)
        if not self._said_outside:
            drawn = counters.generated + counters.verified
            text = advice.outside_top_k(self._config, drawn=drawn, outside=counters.outside)
            if text is not None:
                self._said_outside = True
                self.say(text)

    def _recent(self, now: float, counters: Counters) -> tuple[Counters, float]:
        """What the generators did lately, and in how many seconds.

        Generators report twice a second and a step may take less: rates are taken over the last
        RATE_SECONDS at least.
        """
        self._history.append((now, counters))
        while len(self._history) > 2 and self._history[1][0] <= now - RATE_SECONDS:
            self._history.popleft()
        began, before = self._history[0]
        return counters.since(before), max(1e-9, now - began)

    # ---------------------------------------------------------------- to be seen

    def show(self, fleet: Fleet, evaluation: EvaluationRound | None) -> None:
        """Refresh the live view."""
        self._fleet = fleet
        view = self._run_view(fleet, evaluation)
        self._view.update(view)
        metrics = self._metrics
        metrics.eta.set(view.eta_seconds or 0.0)
        metrics.samples.of("running").set(view.samples_running or 0)
        metrics.samples.of("held").set(view.samples_held or 0)
        metrics.samples.of("queued").set(view.samples_queued or 0)
        states = Counter(worker.state for worker in fleet.everyone() if not worker.is_trainer)
        for state in ("starting", "ready", "lost"):
            metrics.generators.of(state).set(states[state])

    def _phase_text(self, fleet: Fleet, evaluation: EvaluationRound | None) -> str:
        if evaluation is not None:
            return f"evaluating {evaluation.finished}/{evaluation.total}"
        if self.stopping:
            return "stopping"
        return self._phase if fleet.all_ready or self._scheduler is not None else "starting"

    def _run_view(self, fleet: Fleet, evaluation: EvaluationRound | None) -> RunView:
        row = self._last_row
        new = count(fleet).since(self._base)
        left = self._config.run.steps - self._step
        elapsed = time.monotonic() - self._began
        trainer = fleet.trainer.trainer_report
        view = None if self._scheduler is None else self._scheduler.snapshot()
        waiting_for = view.waits[0] if view is not None and view.waits else None
        if view is None and not fleet.all_ready:
            waiting_for = f"{fleet.unready()} to become ready"
        return RunView(
            phase=self._phase_text(fleet, evaluation),
            step=self._step,
            reward_mean=row.get("reward_mean"),
            recent_rewards=tuple(self._rewards),
            tokens_per_second=row.get("tokens_per_second"),
            staleness_mean=row.get("staleness_mean"),
            staleness_max=row.get("staleness_max"),
            draft_acceptance=new.accepted / new.drafted if new.drafted else None,
            drafted_share=new.accepted / new.generated if new.generated else None,
            samples_running=None if view is None else view.samples_running,
            samples_held=None if view is None else view.samples_held,
            samples_queued=None if trainer is None else trainer.queued_trajectories,
            generator_idle=row.get("generator_idle"),
            trainer_idle=row.get("trainer_idle"),
            eta_seconds=elapsed / self._steps_here * left if self._steps_here else None,
            accuracy_before=self._before,
            waiting_for=waiting_for,
        )

    def status(self, fleet: Fleet, evaluation: EvaluationRound | None) -> dict[str, Any]:
        """The same for `asyncrl status`, as plain values."""
        view = self._run_view(fleet, evaluation)
        shown = {
            name: getattr(view, name)
            for name in RunView.__dataclass_fields__
            if name != "recent_rewards"
        }
        processes = {
            worker.name: {
                "state": worker.state,
                "policy_version": worker.policy_version,
                "metrics_port": worker.metrics_port,
            }
            for worker in fleet.everyone()
        }
        return {
            "run": self._config.run.name,
            "steps": self._config.run.steps,
            "engine": self._config.engine.kind,
            **shown,
            "processes": processes,
        }

    def result(self) -> dict[str, Any]:
        """Totals of the training phase for result.json."""
        total = self._final or Counters()
        means = [mean for mean, _ in self._staleness]
        stalest = max((most for _, most in self._staleness), default=0.0)
        return {
            "steps": self._step,
            "wall_seconds": self._earlier.seconds + self._trained_seconds,
            "tokens_generated": self._earlier.generated + total.generated,
            "tokens_drafted": self._earlier.drafted + total.drafted,
            "tokens_reused": self._earlier.accepted + total.accepted,
            "tokens_verified": self._earlier.verified + total.verified,
            "tokens_rejected": self._earlier.rejected + total.rejected,
            "staleness_mean": statistics.fmean(means) if means else 0.0,
            "staleness_max": stalest,
            "exactly_on_policy": stalest == 0 and advice.follows_the_policy(self._config),
        }
