"""Every Prometheus metric of asyncrl, declared once.

Each process of a run has one role and exports that role's class, every series labelled with the
process's name. Names begin with `asyncrl_`, units are base units (seconds, bytes, tokens, ratio
from 0 to 1), counters end in `_total`. Series with a fixed set of label values exist from the
start, so that a rate over them is never missing; other values are refused.

Gauges of a step read their value from the step's record (`wire.records.step`), with checked names.
To add a metric, add a field and run `make docs`, which generates docs/metrics.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from prometheus_client import Gauge, Histogram

from asyncrl.monitoring.metrics.controller_metrics import ControllerMetrics as ControllerMetrics
from asyncrl.monitoring.metrics.instruments import (
    TOKENS,
    By,
    MetricSpec,
    Total,
    counter,
    gauge,
    histogram,
    specs_of,
)
from asyncrl.monitoring.metrics.instruments import new_registry as new_registry
from asyncrl.monitoring.metrics.occupancy import SlotPiece, SlotUse
from asyncrl.monitoring.metrics.process_metrics import CommonMetrics
from asyncrl.monitoring.metrics.process_metrics import ProcessMetrics as ProcessMetrics
from asyncrl.wire.messages.from_trainer import CheckpointFault
from asyncrl.wire.records.step import LearnerMetrics, Measured
from asyncrl.wire.weights.layout import Outcome

# ruff: noqa: RUF009 - the calls below make dataclass fields; ruff cannot see that through a helper


@dataclass(frozen=True, slots=True)
class RelayMetrics(CommonMetrics):
    """One relay: the weights, the control messages and the files of its node."""

    weights_sent: Total = counter(
        "asyncrl_relay_weights_sent_bytes_total", "Weights sent to other nodes."
    )
    weights_received: Total = counter(
        "asyncrl_relay_weights_received_bytes_total",
        "Weights that came from other nodes, of versions that are whole.",
    )
    weights_fetched: By[Total] = counter(
        "asyncrl_relay_weights_fetches_total",
        "Versions that were to be brought to this node, by what came of it.",
        labels={"outcome": ("whole", "superseded", "failed")},
    )
    weights_time: Histogram = histogram(
        "asyncrl_relay_weights_fetch_seconds",
        "From the order to fetch a version to the whole version in this node's memory.",
    )
    frames: By[Total] = counter(
        "asyncrl_relay_frames_total",
        "Frames of control messages that were passed on: up to the controller, down to this "
        "node's processes.",
        labels={"direction": ("up", "down")},
    )
    bundles: By[Total] = counter(
        "asyncrl_relay_bundles_total",
        "Bundles in which these frames travelled between relay and controller.",
        labels={"direction": ("up", "down")},
    )
    dropped: Total = counter(
        "asyncrl_relay_dropped_frames_total",
        "Frames and bundles that could not be passed on; sessions send them again.",
    )
    waiting: Gauge = gauge(
        "asyncrl_relay_waiting_frames", "Frames that are gathered and leave soon."
    )
    files_sent: Total = counter(
        "asyncrl_relay_files_sent_bytes_total", "Parts of files sent to other relays."
    )
    files_copied: Total = counter(
        "asyncrl_relay_files_copied_bytes_total",
        "Parts of other nodes' files that were copied into the run's folder.",
    )
    nodes_followed: Gauge = gauge(
        "asyncrl_relay_followed_nodes", "Nodes whose files this relay copies."
    )
    nodes_failing: Gauge = gauge(
        "asyncrl_relay_failing_nodes", "Of these, nodes whose files could not be copied last time."
    )


def _learner_gauge(name: str, text: str, value: Callable[[LearnerMetrics], Measured]) -> Any:
    return gauge(name, text, value=value)


@dataclass(frozen=True, slots=True)
class GeneratorMetrics(ProcessMetrics):
    """One generator: its engine, its drafts, its rewards, its deliveries."""

    generated_tokens: Total = counter(
        "asyncrl_generated_tokens_total", "Response tokens, accepted drafts included."
    )
    drafted_tokens: Total = counter(
        "asyncrl_drafted_tokens_total", "Tokens that the cache proposed to the engine."
    )
    accepted_tokens: Total = counter(
        "asyncrl_accepted_tokens_total", "Proposed tokens that the policy accepted."
    )
    verified_tokens: Total = counter(
        "asyncrl_verified_tokens_total",
        "Tokens of an older policy version that verification accepted.",
    )
    rejected_tokens: Total = counter(
        "asyncrl_rejected_tokens_total",
        "Tokens of an older policy version that verification rejected; they are regenerated.",
    )
    outside_top_k_tokens: Total = counter(
        "asyncrl_outside_top_k_tokens_total",
        "Generated and verified tokens that are not among the top K stored with them.",
    )
    noise_floor_judged: Total = counter(
        "asyncrl_noise_floor_judged_tokens_total",
        "Tokens of the current policy version that were verified again under that version.",
    )
    noise_floor_rejected: Total = counter(
        "asyncrl_noise_floor_rejected_tokens_total",
        "Of the tokens verified again under their own policy version, those that were rejected.",
    )
    noise_floor_difference: Gauge = gauge(
        "asyncrl_noise_floor_logprob_nats",
        "Mean absolute difference of the log-probability of a token in drawing and in "
        "verification under one policy version.",
    )
    engine_steps: Total = counter(
        "asyncrl_engine_steps_total", "Forward passes of the decoding loop."
    )
    engine_busy: Total = counter(
        "asyncrl_engine_busy_seconds_total", "Time inside the decoding loop's steps."
    )
    slots: Gauge = gauge("asyncrl_engine_slots", "Requests that can run at once.")
    slot_seconds: By[Total] = counter(
        "asyncrl_slot_seconds_total",
        "Time of the engine's slots, by use; empty slots are idle.",
        labels={"kind": tuple(use.value for use in SlotUse)},
    )
    running: Gauge = gauge("asyncrl_engine_running_requests", "Requests that hold a slot.")
    waiting: Gauge = gauge("asyncrl_engine_waiting_requests", "Requests that wait for a slot.")
    due_wait: Gauge = gauge(
        "asyncrl_due_wait_seconds",
        "How long a due sample has been waiting for a slot or for KV space; the longest such wait.",
    )
    kv_used: Gauge = gauge("asyncrl_engine_kv_used_ratio", "Share of the KV space in use.")
    samples_held: Gauge = gauge(
        "asyncrl_held_samples", "Finished samples that the trainer has not acknowledged yet."
    )
    samples_finished: By[Total] = counter(
        "asyncrl_finished_samples_total",
        "Samples generated to their end, by finish reason.",
        labels={"reason": ("stop", "length", "abort", "deadline")},
    )
    response_length: Histogram = histogram(
        "asyncrl_response_length_tokens", "Length of finished responses.", buckets=TOKENS
    )
    preempted: Total = counter(
        "asyncrl_preempted_samples_total",
        "Samples of later steps that gave their slot to due ones; their tokens are kept.",
    )
    deliveries: Total = counter(
        "asyncrl_deliveries_total", "Trajectories sent to the trainer, repetitions included."
    )
    redeliveries: Total = counter(
        "asyncrl_redeliveries_total",
        "Trajectories sent to the trainer again because it had not acknowledged them.",
    )
    weights_time: Histogram = histogram(
        "asyncrl_weights_install_seconds",
        "From the command to swap weights to the first engine step on them.",
    )
    rewards_waiting: Gauge = gauge(
        "asyncrl_rewards_waiting_samples", "Samples whose reward is not computed yet."
    )
    rewards_failed: By[Total] = counter(
        "asyncrl_reward_failures_total",
        "Reward calls that gave no reward, by function and reason.",
        labels={"function": None, "reason": None},
    )
    rewards_retried: Total = counter(
        "asyncrl_reward_retries_total",
        "Reward calls that were repeated because their process had died.",
    )
    service_requests: By[Total] = counter(
        "asyncrl_reward_requests_total",
        "Requests of `reward_model` and `judge` to their servers, repeated ones included.",
        labels={"function": None},
    )
    service_retries: By[Total] = counter(
        "asyncrl_reward_request_retries_total",
        "Requests that were repeated, by function and what was wrong: throttled, server_error, "
        "connection or timeout.",
        labels={"function": None, "reason": None},
    )
    service_seconds: By[Total] = counter(
        "asyncrl_reward_request_seconds_total",
        "Seconds in calls to a server, waiting between attempts included, all calls added up.",
        labels={"function": None},
    )
    service_opened: By[Total] = counter(
        "asyncrl_reward_breaker_opened_total",
        "How often calls to a server were suspended because several in a row had failed.",
        labels={"function": None},
    )
    reward_time: Histogram = histogram(
        "asyncrl_reward_seconds", "One reward call, queueing included."
    )
    environment_waiting: Gauge = gauge(
        "asyncrl_environment_waiting_samples",
        "Samples whose environment has to answer before they need a slot.",
    )
    environment_queued: Gauge = gauge(
        "asyncrl_environment_queued_samples",
        "Of the samples that wait for their environment, those for which none may be opened yet "
        "(environment.sessions).",
    )
    environment_time: By[Histogram] = histogram(
        "asyncrl_environment_seconds",
        "One call of an environment, by method (reset, step or restore), failed ones included.",
        labels={"method": None},
    )
    environment_turns: Total = counter(
        "asyncrl_environment_turns_total",
        "Turns that environments have answered, replayed ones included.",
    )
    environment_replayed: Total = counter(
        "asyncrl_environment_replays_total",
        "Environments that were made again and given the accepted turns once more.",
    )
    environment_restored: Total = counter(
        "asyncrl_environment_restores_total",
        "Environments that went back to before a turn by their restore.",
    )
    environment_started_over: Total = counter(
        "asyncrl_environment_started_over_samples_total",
        "Samples that began again because their environment cannot go back.",
    )
    environment_lost: Total = counter(
        "asyncrl_environment_lost_samples_total",
        "Of the samples that began again, those whose worker process had ended.",
    )
    environment_hanging: Total = counter(
        "asyncrl_environment_hanging_threads_total",
        "Threads of environments and agents that were left behind because they hang.",
    )
    environment_replaced: Total = counter(
        "asyncrl_environment_replaced_workers_total",
        "Worker processes of environments that ended, or were ended, and were replaced.",
    )
    environment_wrong_calls: Total = counter(
        "asyncrl_environment_wrong_calls_total",
        "Calls of tools that could not be read, named no tool or had wrong arguments.",
    )

    def observe_slots(self, piece: SlotPiece) -> None:
        """Count how slots were used; pass this to `SlotLog(observe=...)`."""
        for use, seconds in piece.slot_seconds().items():
            self.slot_seconds.of(use).inc(seconds)


@dataclass(frozen=True, slots=True)
class TrainerMetrics(ProcessMetrics):
    """One trainer: what it received, and its last step."""

    steps: Total = counter("asyncrl_optimizer_steps_total", "Optimizer steps done.")
    tokens: Total = counter("asyncrl_trained_tokens_total", "Response tokens trained on.")
    samples: Total = counter("asyncrl_trained_samples_total", "Trajectories trained on.")
    queued: Gauge = gauge(
        "asyncrl_queued_samples", "Trajectories received that no finished step has used."
    )
    duplicates: Total = counter(
        "asyncrl_duplicate_samples_total", "Trajectories that arrived again and were dropped."
    )
    unlogged_samples: Total = counter(
        "asyncrl_unlogged_samples_total",
        "Trained samples that could not be written to the sample log.",
    )
    train_time: Histogram = histogram(
        "asyncrl_train_seconds", "Forward, backward and optimizer work of one step."
    )
    rank_wait: Histogram = histogram(
        "asyncrl_rank_wait_seconds",
        "Wait of a rank of the trainer, in one step, for the ranks that still compute gradients.",
    )
    publish_time: Histogram = histogram(
        "asyncrl_weights_publish_seconds", "Writing one version of the weights for the generators."
    )
    weight_broadcasts: By[Total] = counter(
        "asyncrl_weight_broadcasts_total",
        "Broadcasts of a version to a group of engine processes, by how they ended; those of a "
        "broken one read the file.",
        labels={"outcome": get_args(Outcome)},
    )
    weights_size: Gauge = gauge("asyncrl_weights_bytes", "Size of one version of the weights.")
    checkpoint_time: Histogram = histogram("asyncrl_checkpoint_seconds", "Writing one checkpoint.")
    checkpoint_blocked: Total = counter(
        "asyncrl_checkpoint_blocked_seconds_total", "Training stood still for checkpoints."
    )
    checkpoints_failed: By[Total] = counter(
        "asyncrl_checkpoints_failed_total",
        "Checkpoints that the disk did not take, by cause; training continues.",
        labels={"cause": get_args(CheckpointFault)},
    )
    checkpointed: Gauge = gauge(
        "asyncrl_last_checkpoint_timestamp_seconds",
        "Unix time of the last checkpoint; of the trainer's start before its first.",
    )
    checkpoint_every: Gauge = gauge(
        "asyncrl_checkpoint_interval_steps", "Optimizer steps between two checkpoints."
    )
    unsaved: Gauge = gauge(
        "asyncrl_unsaved_steps", "Optimizer steps that no checkpoint of this trainer holds yet."
    )
    zero_variance: Gauge = _learner_gauge(
        "asyncrl_zero_variance_groups_ratio",
        "Share of the last step's groups whose advantages are all 0: they teach nothing.",
        lambda step: (
            step.batch.zero_variance_groups / step.batch.groups if step.batch.groups else None
        ),
    )
    truncated: Gauge = _learner_gauge(
        "asyncrl_truncated_samples_ratio",
        "Share of the last step's samples that the token limit or a deadline cut off.",
        lambda step: step.batch.truncated_share,
    )
    loss: Gauge = _learner_gauge(
        "asyncrl_loss", "Loss of the last step.", lambda step: step.learning.loss
    )
    grad_norm: Gauge = _learner_gauge(
        "asyncrl_gradient_norm",
        "Norm of the last step's gradient before clipping.",
        lambda step: step.learning.grad_norm,
    )
    entropy: Gauge = _learner_gauge(
        "asyncrl_policy_entropy_nats",
        "Mean entropy of the policy per token.",
        lambda step: step.learning.entropy,
    )
    behaviour_kl: Gauge = _learner_gauge(
        "asyncrl_behaviour_kl_nats",
        "Estimated KL(behaviour || current) per token: how far the policy has moved since drawing.",
        lambda step: step.mismatch.kl,
    )
    mismatch: Gauge = _learner_gauge(
        "asyncrl_logprob_mismatch_nats",
        "Mean absolute difference between the engine's log-probabilities and the trainer's, "
        "over tokens of staleness 0.",
        lambda step: step.mismatch.fresh_abs_mean,
    )
    learning_rate: Gauge = _learner_gauge(
        "asyncrl_learning_rate",
        "Learning rate of the last step.",
        lambda step: step.learning.learning_rate,
    )
    algorithm: By[Gauge] = gauge(
        "asyncrl_algorithm_signal",
        "What the algorithm reports of the last step, by the signals that it declares.",
        labels={"signal": None},
    )

    def publish(self, metrics: LearnerMetrics) -> None:
        """Set the gauges of a step; one whose value is None keeps its last."""
        self.set_gauges(metrics)
        for signal, value in metrics.algorithm.items():
            if value is not None:
                self.algorithm.of(signal).set(value)


ROLES = (ControllerMetrics, GeneratorMetrics, TrainerMetrics, RelayMetrics)


def all_specs() -> Iterator[tuple[type[CommonMetrics], MetricSpec]]:
    """Every declared metric with its role; those of base classes come with each role."""
    return ((role, spec) for role in ROLES for _, spec in specs_of(role))
