"""Every metric of asyncrl, declared once, here.

Each process of a run has one role and exports that role's class plus `ProcessMetrics`, every
series labelled with the process's name. Names begin with `asyncrl_`, units are base units
(seconds, bytes, tokens, ratio from 0 to 1), counters end in `_total`. Series with a fixed set of
label values exist from the start, so that a rate over them is never missing; other values are
refused.

    registry = new_registry()
    metrics = GeneratorMetrics.register(registry, process="generator-0")
    metrics.generated_tokens.follow(engine.stats().tokens.generated)
    metrics.samples_finished.of("stop").inc()

To add a metric, add a field; docs, dashboards and alert rules are checked against `all_specs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from prometheus_client import CollectorRegistry, Gauge, Histogram

from monitoring.instruments import TOKENS, By, MetricSpec, Total, build, new_registry
from monitoring.occupancy import SlotPiece, SlotUse
from monitoring.spans import IdleWindow, Span, SpanKind

__all__ = [
    "ROLES",
    "ControllerMetrics",
    "GeneratorMetrics",
    "ProcessMetrics",
    "TrainerMetrics",
    "all_specs",
    "new_registry",
]

# ruff: noqa: RUF009 - the calls below make dataclass fields; ruff cannot see that through a helper


def _total(name: str, text: str, **more: Any) -> Any:
    return field(metadata={"spec": MetricSpec(name, "counter", text, **more)})


def _gauge(name: str, text: str, **more: Any) -> Any:
    return field(metadata={"spec": MetricSpec(name, "gauge", text, **more)})


def _histogram(name: str, text: str, **more: Any) -> Any:
    return field(metadata={"spec": MetricSpec(name, "histogram", text, **more)})


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """What every process exports."""

    policy_version: Gauge = _gauge(
        "asyncrl_policy_version", "Optimizer steps behind the weights that this process uses."
    )
    activity: By[Total] = _total(
        "asyncrl_activity_seconds_total",
        "Time spent, by what the process did.",
        label="kind",
        values=tuple(kind.value for kind in SpanKind),
    )
    idle: By[Total] = _total(
        "asyncrl_idle_seconds_total", "Time spent waiting, by what for.", label="cause"
    )
    idle_ratio: By[Gauge] = _gauge(
        "asyncrl_idle_ratio",
        "Share of the last minute that was spent waiting, by what for; causes add up.",
        label="cause",
    )
    recent: IdleWindow = field(default_factory=IdleWindow, kw_only=True, repr=False)
    """The last minute of the time line; no metric."""

    @classmethod
    def register(cls, registry: CollectorRegistry, process: str) -> Self:
        """Create this role's metrics in `registry`, labelled with the process's name.

        Raises:
            ValueError: the registry already has metrics of these names.
        """
        made: dict[str, Any] = {}
        for name, spec in _specs(cls):
            made[name] = build(spec, registry, process)
        return cls(**made)

    def publish(self, row: Mapping[str, float | None]) -> None:
        """Set every gauge that has a name in metrics.jsonl from such a line; others stay."""
        for name, spec in _specs(type(self)):
            value = row.get(spec.key or "")
            if value is not None:
                getattr(self, name).set(value)

    def observe_span(self, span: Span) -> None:
        """Count a piece of the time line: pass this to `Timeline(observe=...)`."""
        if span.kind in _KINDS:
            self.activity.of(span.kind).inc(span.seconds)
        if span.kind == SpanKind.WAITING:
            self.idle.of(span.cause).inc(span.seconds)
        for cause, share in self.recent.add(span).items():
            self.idle_ratio.of(cause).set(share)


def _specs(role: type[ProcessMetrics]) -> Iterator[tuple[str, MetricSpec]]:
    """Field and description of each metric of a role."""
    for one in fields(role):
        if "spec" in one.metadata:
            yield one.name, one.metadata["spec"]


_KINDS = frozenset(kind.value for kind in SpanKind)


@dataclass(frozen=True, slots=True)
class ControllerMetrics(ProcessMetrics):
    """The run as a whole, seen by its conductor."""

    run: By[Gauge] = _gauge("asyncrl_run_info", "1 for the name of the run.", label="run")
    started: Gauge = _gauge("asyncrl_run_start_time_seconds", "Unix time of the run's start.")
    steps: Total = _total("asyncrl_steps_total", "Optimizer steps finished.")
    steps_planned: Gauge = _gauge("asyncrl_planned_steps", "Optimizer steps that the run will do.")
    eta: Gauge = _gauge("asyncrl_eta_seconds", "Estimated time until the last step.")
    step_time: Histogram = _histogram("asyncrl_step_seconds", "From one finished step to the next.")
    reward_mean: Gauge = _gauge(
        "asyncrl_reward_mean", "Mean reward of the last step's samples.", key="reward_mean"
    )
    reward_std: Gauge = _gauge(
        "asyncrl_reward_std", "Standard deviation of these rewards.", key="reward_std"
    )
    staleness_mean: Gauge = _gauge(
        "asyncrl_staleness_mean_steps",
        "Mean over the last step's tokens of the steps between drawing and training.",
        key="staleness_mean",
    )
    staleness_max: Gauge = _gauge(
        "asyncrl_staleness_max_steps", "The largest of these.", key="staleness_max"
    )
    throughput: Gauge = _gauge(
        "asyncrl_generation_tokens_per_second",
        "Response tokens finished per second over the last step, all generators together.",
        key="tokens_per_second",
    )
    generator_idle: Gauge = _gauge(
        "asyncrl_generator_idle_ratio",
        "Share of the last step's time in which generators did nothing, their mean.",
        key="generator_idle",
    )
    trainer_idle: Gauge = _gauge(
        "asyncrl_trainer_idle_ratio",
        "Share of the last step's time in which the trainer did nothing.",
        key="trainer_idle",
    )
    accuracy: By[Gauge] = _gauge(
        "asyncrl_evaluation_accuracy_ratio",
        "Mean reward on the held-out set, sampled as in training.",
        label="when",
        values=("before", "after"),
    )
    samples: By[Gauge] = _gauge(
        "asyncrl_samples_in_flight",
        "Samples between issue and training, by where they are.",
        label="state",
        values=("running", "held", "queued"),
    )
    samples_ended: By[Total] = _total(
        "asyncrl_samples_total",
        "Samples that left the pipeline, by how.",
        label="outcome",
        values=("trained", "failed", "discarded"),
    )
    generators: By[Gauge] = _gauge(
        "asyncrl_generators",
        "Generator processes, by state.",
        label="state",
        values=("starting", "ready", "lost"),
    )
    events: By[Total] = _total(
        "asyncrl_scheduler_events_total", "Events given to the scheduler, by type.", label="event"
    )
    event_time: Total = _total(
        "asyncrl_scheduler_seconds_total", "Time spent inside the scheduler's decisions."
    )
    process_failures: By[Total] = _total(
        "asyncrl_process_failures_total",
        "Processes that ended before they were told to, by role.",
        label="role",
        values=("generator", "trainer", "reward"),
    )


@dataclass(frozen=True, slots=True)
class GeneratorMetrics(ProcessMetrics):
    """One generator: its engine, its drafts, its rewards, its deliveries."""

    generated_tokens: Total = _total(
        "asyncrl_generated_tokens_total", "Response tokens, accepted drafts included."
    )
    drafted_tokens: Total = _total(
        "asyncrl_drafted_tokens_total", "Tokens that the cache proposed to the engine."
    )
    accepted_tokens: Total = _total(
        "asyncrl_accepted_tokens_total", "Proposed tokens that the policy accepted."
    )
    verified_tokens: Total = _total(
        "asyncrl_verified_tokens_total",
        "Tokens of an older policy version that verification accepted.",
    )
    rejected_tokens: Total = _total(
        "asyncrl_rejected_tokens_total",
        "Tokens of an older policy version that verification rejected; written again.",
    )
    engine_steps: Total = _total(
        "asyncrl_engine_steps_total", "Forward passes of the decoding loop."
    )
    engine_busy: Total = _total(
        "asyncrl_engine_busy_seconds_total", "Time inside the decoding loop's steps."
    )
    slots: Gauge = _gauge("asyncrl_engine_slots", "Requests that can run at once.")
    slot_seconds: By[Total] = _total(
        "asyncrl_slot_seconds_total",
        "Time of the engine's slots, by what they were used for; idle ones included.",
        label="kind",
        values=tuple(use.value for use in SlotUse),
    )
    running: Gauge = _gauge("asyncrl_engine_running_requests", "Requests that hold a slot.")
    waiting: Gauge = _gauge("asyncrl_engine_waiting_requests", "Requests that wait for a slot.")
    kv_used: Gauge = _gauge("asyncrl_engine_kv_used_ratio", "Share of the KV space in use.")
    samples_held: Gauge = _gauge(
        "asyncrl_held_samples", "Finished samples that are not acknowledged by the trainer yet."
    )
    samples_finished: By[Total] = _total(
        "asyncrl_finished_samples_total",
        "Samples written to their end, by why they ended.",
        label="reason",
        values=("stop", "length", "abort", "deadline"),
    )
    response_length: Histogram = _histogram(
        "asyncrl_response_length_tokens", "Length of finished responses.", buckets=TOKENS
    )
    preempted: Total = _total(
        "asyncrl_preempted_samples_total",
        "Samples of later steps that gave their slot to due ones; what they had is kept.",
    )
    deliveries: Total = _total(
        "asyncrl_deliveries_total", "Trajectories sent to the trainer, repetitions included."
    )
    redeliveries: Total = _total(
        "asyncrl_redeliveries_total", "Of these, sent again for want of an acknowledgement."
    )
    weights_time: Histogram = _histogram(
        "asyncrl_weights_install_seconds",
        "From the order to swap weights to the first step on them.",
    )
    rewards_waiting: Gauge = _gauge(
        "asyncrl_rewards_waiting_samples", "Samples whose reward is not computed yet."
    )
    rewards_failed: Total = _total(
        "asyncrl_rewards_failed_total", "Reward calls that raised or took too long."
    )
    reward_time: Histogram = _histogram(
        "asyncrl_reward_seconds", "One reward call, queueing included."
    )

    def observe_slots(self, piece: SlotPiece) -> None:
        """Count how slots were used: pass this to `SlotLog(observe=...)`."""
        for use, seconds in piece.slot_seconds().items():
            self.slot_seconds.of(use).inc(seconds)


@dataclass(frozen=True, slots=True)
class TrainerMetrics(ProcessMetrics):
    """One trainer: what came in, what the last step was like."""

    steps: Total = _total("asyncrl_optimizer_steps_total", "Optimizer steps done.")
    tokens: Total = _total("asyncrl_trained_tokens_total", "Response tokens trained on.")
    samples: Total = _total("asyncrl_trained_samples_total", "Trajectories trained on.")
    queued: Gauge = _gauge(
        "asyncrl_queued_samples", "Trajectories received that no finished step has used."
    )
    duplicates: Total = _total(
        "asyncrl_duplicate_samples_total", "Trajectories that arrived again and were dropped."
    )
    train_time: Histogram = _histogram(
        "asyncrl_train_seconds", "Forward, backward and optimizer work of one step."
    )
    publish_time: Histogram = _histogram(
        "asyncrl_weights_publish_seconds", "Writing one version of the weights for the generators."
    )
    weights_size: Gauge = _gauge("asyncrl_weights_bytes", "Size of one version of the weights.")
    checkpoint_time: Histogram = _histogram("asyncrl_checkpoint_seconds", "Writing one checkpoint.")
    loss: Gauge = _gauge("asyncrl_loss", "Loss of the last step.", key="loss")
    grad_norm: Gauge = _gauge(
        "asyncrl_gradient_norm", "Norm of its gradient before clipping.", key="grad_norm"
    )
    entropy: Gauge = _gauge(
        "asyncrl_policy_entropy_nats", "Mean entropy of the policy per token.", key="entropy"
    )
    clipped: Gauge = _gauge(
        "asyncrl_clipped_tokens_ratio", "Share of tokens whose ratio was clipped.", key="clip_ratio"
    )
    kl: Gauge = _gauge(
        "asyncrl_behaviour_kl_nats",
        "Estimated divergence of the trained policy from the one that drew the tokens.",
        key="kl",
    )
    mismatch: Gauge = _gauge(
        "asyncrl_logprob_mismatch_nats",
        "Mean absolute difference between the engine's log-probabilities and the trainer's.",
        key="mismatch_abs_mean",
    )
    learning_rate: Gauge = _gauge(
        "asyncrl_learning_rate", "Learning rate of the last step.", key="learning_rate"
    )


ROLES: tuple[type[ProcessMetrics], ...] = (ControllerMetrics, GeneratorMetrics, TrainerMetrics)


def all_specs() -> Iterator[tuple[type[ProcessMetrics], MetricSpec]]:
    """Every declared metric with its role; what all roles export comes with each."""
    for role in ROLES:
        for _, spec in _specs(role):
            yield role, spec
