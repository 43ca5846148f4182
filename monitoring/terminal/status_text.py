"""The text of `asyncrl status`: the state of a run in a few lines."""

from collections.abc import Mapping
from typing import Any

from asyncrl.monitoring.terminal.formatting import ON_POLICY, brief, duration
from asyncrl.wire.records.reward_counts import RewardCounts

_LINES: tuple[tuple[str, ...], ...] = (
    ("{run}: {phase}", "{step} of {steps} steps", "{engine} engine", "{left} left"),
    ("waiting: {waiting_for}",),
    (
        "reward {reward_mean:.3f}",
        "accuracy before training {accuracy_before:.3f}",
        "after {accuracy_after:.3f}",
    ),
    (
        "length {response_length:,.0f} tokens",
        "{truncated_share:.0%} cut off",
        "{signalless_share:.0%} of groups without signal",
    ),
    (
        "accuracy of step {accuracy_later} {accuracy:.3f}",
        "held-out reward {held_out_reward:.3f}",
        "{evaluation_incomplete}",
        "best {best_accuracy:.3f} at step {best_step}",
        "evaluating {evaluating}",
    ),
    ("staleness {staleness_mean:.2f} on average", "{staleness_max} at most", "{on_policy}"),
    ("run-ahead: {run_ahead}",),
    (
        "{tokens_per_second:,.0f} tokens/s",
        "{drafted_share:.0%} of tokens drafted",
        "{draft_acceptance:.0%} of drafts accepted",
    ),
    (
        "groups: {groups_trained:,} trained on",
        "{groups_failed:,} failed",
        "{groups_without_signal:,} without signal",
        "{groups_in_flight:,} in flight",
        "{groups_delivered:,} delivered",
    ),
    (
        "samples: {samples_running:,} running",
        "{in_environments:,} of them wait for environments",
        "{samples_held:,} held",
        "{samples_queued:,} queued",
    ),
    (
        "environments: {environment_turns:,} turns answered",
        "{answered} each",
        "{started_over:,} samples started over",
    ),
    ("rewards: {rewards_failed:,} failed and counted as 0 ({failures})",),
    (
        "idle: generators {generator_idle:.0%}",
        "trainer {trainer_idle:.0%}",
        "steps wait for rewards {waiting_for_rewards:.0%} of their time",
    ),
)
_PROCESS = ("{state}", "policy version {policy_version}", "metrics on port {metrics_port}")


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """Format the reply to a status request, without unknown values."""
    if status["phase"].startswith("evaluating"):  # nothing is queued, and the phase says it
        status = {**status, "evaluating": None, "samples_queued": None}
    eta = status.get("eta_seconds")
    on_policy = status.get("exactly_on_policy") if status["step"] else None
    answered = status.get("environment_seconds")
    failed = RewardCounts(failed=status.get("reward_failures") or {})
    after = status.get("accuracy_after")
    so_far = " so far" if status.get("processes") else ""  # an ended run has none
    known = {
        **status,
        # That of step 0, or of the last one, is in the line before.
        "accuracy_later": status.get("accuracy_step") or None if after is None else None,
        "left": None if eta is None else duration(eta),
        "in_environments": status.get("samples_in_environments") or None,
        "answered": None if answered is None else brief(answered),
        "failures": failed.describe_failures(),
        "on_policy": None if on_policy is None else ON_POLICY[on_policy] + so_far,
    }
    lines = [_filled(parts, known) for parts in _LINES]
    for name, about in status.get("processes", {}).items():
        version = about["policy_version"]
        has_weights = {"policy_version": version if version >= 0 else None}
        lines.append(f"  {name}: {_filled(_PROCESS, {**about, **has_weights})}")
    return [line for line in lines if line]


def _filled(parts: tuple[str, ...], values: Mapping[str, Any]) -> str:
    known = {name: value for name, value in values.items() if value is not None}
    filled = []
    for part in parts:
        try:
            filled.append(part.format_map(known))
        except KeyError:
            continue
    return ", ".join(filled)
