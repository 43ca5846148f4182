"""Everything that the audit says about one finished run."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.monitoring.records.trained_samples import TrainedSample, read_trained_samples
from asyncrl.rewards.functions import arithmetic
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.prompts import Task
from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.checkpoint.format.files import path_of
from benchmarks.live_audit import games, gradients, independence, reference, statements
from benchmarks.live_audit.rewards import Auditor
from benchmarks.live_audit.statements import Statement
from benchmarks.live_audit.tokens import tokens_of

FALSE_ALARM = 1e-4
"""Probability that the audit of a right run fails, divided among its statements (Bonferroni)."""

SHOWN = 12
"""Statements that are written to JSON: those with the lowest p-values."""


class NotAuditableError(ValueError):
    """A run that does not say enough, or does not claim to be exactly on-policy. Says why."""


@dataclass(frozen=True)
class Report:
    run: str
    samples: int
    tokens: int
    counts: dict[str, int]
    """Tokens by provenance, and others."""
    worst_logprob: float
    """Largest difference of a recorded and the recomputed log-probability, in nats."""
    gradients: dict[str, float]
    """Largest relative difference of any step, by what was computed again; without it: why."""
    statements: list[Statement]
    faults: list[str]

    @property
    def limit(self) -> float:
        return FALSE_ALARM / max(1, len(self.statements))

    @property
    def failed(self) -> list[Statement]:
        found = [one for one in self.statements if one.p_value < self.limit]
        return sorted(found, key=lambda one: one.p_value)

    @property
    def p_value(self) -> float:
        least = min((one.p_value for one in self.statements), default=1.0)
        return min(1.0, least * len(self.statements))

    @property
    def is_fine(self) -> bool:
        return not self.failed and not self.faults

    def as_dict(self) -> dict[str, Any]:
        own = asdict(self)
        worst = sorted(own["statements"], key=lambda one: one["p_value"])[:SHOWN]
        more = {"statements": len(self.statements), "worst": worst, "p_value": self.p_value}
        return own | more | {"fine": self.is_fine, "limit": self.limit}


def refusal(config: RunConfig) -> str | None:
    """Why nothing can be said about such a run; None if something can."""
    scheduler = config.scheduler
    if config.run.log_samples != "jsonl" or not config.run.log_sample_tokens:
        return "it logged no tokens: run.log_samples=jsonl and run.log_sample_tokens=true"
    if scheduler.max_off_policy_steps or not config.samples_follow_policy:
        return (
            "it does not claim to be exactly on-policy (scheduler.max_off_policy_steps above 0, "
            "cache.reuse: lenient, or scheduler.sample_deadline_seconds)"
        )
    if scheduler.dynamic_sampling.enabled:
        return (
            "with scheduler.dynamic_sampling a step's groups are chosen by their rewards, so their "
            "tokens are not draws of the policy; tests/scheduler/test_dynamic_selection.py has the "
            "statements that hold there"
        )
    return None


def audit(run: Path, *, seed: int = 0) -> Report:
    """Read a run, compute the distributions of its tokens and its gradients, and test it."""
    config = load_config(run / "config.yaml")
    if (why := refusal(config)) is not None:
        raise NotAuditableError(f"{run}: {why}")
    key = ("step", "group", "sample")
    records = sorted(
        read_trained_samples(run / "samples"), key=lambda one: [getattr(one, k) for k in key]
    )
    initial = resolve_model(config.model, None)
    turns = config.environment.name is not None
    task = load_task(config.task, initial, config.run.seed, whole_rows=turns)
    with TemporaryDirectory(prefix="asyncrl-audit-") as scratch:
        models = {one.step: str(Path(scratch) / f"{one.step}") for one in records} | {0: initial}
        for step, place in models.items():
            if step and not (saved := path_of(run / "checkpoints", step)).is_dir():
                raise NotAuditableError(
                    f"{run}: there is no checkpoint of version {step}. Every version is needed: "
                    "trainer.checkpoint_every=1 and trainer.keep_checkpoints=1000000"
                )
            if step:
                export(saved, Path(place))
        tokens = tokens_of(records, models, config)
    stops = tuple(task.stop_tokens)
    found = statements.sums(tokens, stops)
    found += statements.uniformity(tokens, seed)
    found += independence.correlations(tokens, seed, config.scheduler.groups_per_step)
    found += independence.repetitions(tokens)
    found.append(independence.shared_numbers(tokens))
    found += reference.statements(records, config, task)
    wrong = reference.faults(records, tokens, config, stops)
    wrong += _wrong_rewards(records, config, task)
    computed: dict[str, float] = {}
    if (why := gradients.why_not(config)) is None:
        computed = gradients.worst_differences(run, records, initial, config)
    else:
        print(f"no gradient is computed again: {why}")
    wrong += [
        f"{what} is {gap:.2g} from what the samples give"
        for what, gap in computed.items()
        if not gap <= gradients.CLOSE
    ]
    with np.errstate(invalid="ignore"):
        worst = float(np.abs(tokens.recorded - reference.recomputed(tokens)).max())
    counts = _counts(records)
    return Report(run.name, len(records), len(tokens), counts, worst, computed, found, wrong)


def _counts(records: Sequence[TrainedSample]) -> dict[str, int]:
    names = ("sampled", "drafted", "verified", "observed")
    found = {name: sum(getattr(one, name) for one in records) for name in names}
    found["samples with verified tokens"] = sum(one.verified > 0 for one in records)
    found["verified in part"] = sum(
        0 < one.verified < one.response_length - one.observed for one in records
    )
    found["steps"] = len({one.step for one in records})
    found["contexts"] = sum(1 + len(one.contexts) for one in records)
    return found


def _wrong_rewards(records: Sequence[TrainedSample], config: RunConfig, task: Task) -> list[str]:
    """Of the built-in task by its text, of games that can be played again by their turns."""
    wrong: Sequence[object] = ()
    name = (config.environment.name or "").rpartition(":")[2]
    if [one.name for one in config.rewards.functions] == ["arithmetic"]:
        examples = {prompt.prompt_id: prompt.example for prompt in task.train}

        def score(one: TrainedSample) -> float:
            text = task.tokenizer.decode(one.response_tokens or [], skip_special_tokens=True)
            return arithmetic("", text, examples[one.prompt_id])

        wrong = [one for one in records if abs(one.reward - score(one)) > 1e-6]
    elif name in games.PLAYED_AGAIN:
        wrong = asyncio.run(Auditor(config, task).wrong(records))
    return [f"{len(wrong)} rewards are not those of the text that was trained on"] if wrong else []
