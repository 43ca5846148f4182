"""Everything that the audit says about one finished run."""

from __future__ import annotations

import shutil
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
from benchmarks.live_audit import independence, reference, statements
from benchmarks.live_audit.statements import Statement
from benchmarks.live_audit.tokens import Tokens, tokens_of

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


@dataclass(frozen=True)
class Material:
    """A run as it is on the disk, and its tokens."""

    name: str
    records: list[TrainedSample]
    tokens: Tokens
    config: RunConfig
    task: Task
    models: dict[int, str]
    """A Hugging Face directory for each step."""

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(self.task.stop_tokens)


def read(run: Path, scratch: Path) -> Material:
    """Read a run and compute the distributions of its tokens."""
    config = load_config(run / "config.yaml")
    if (why := refusal(config)) is not None:
        raise NotAuditableError(f"{run}: {why}")
    key = ("step", "group", "sample")
    records = sorted(
        read_trained_samples(run / "samples"), key=lambda one: [getattr(one, k) for k in key]
    )
    first = resolve_model(config.model, None)
    models = {step: str(scratch / f"{step}") for step in sorted({one.step for one in records})}
    for step, place in models.items():
        if step == 0:
            models[0] = first
        elif not (saved := path_of(run / "checkpoints", step)).is_dir():
            raise NotAuditableError(
                f"{run}: there is no checkpoint of version {step}. Every version is needed: "
                "trainer.checkpoint_every=1 and trainer.keep_checkpoints=1000000"
            )
        elif not Path(place).exists():
            export(saved, Path(place))
    turns = config.environment.name is not None
    task = load_task(config.task, first, config.run.seed, whole_rows=turns)
    return Material(run.name, records, tokens_of(records, models, config), config, task, models)


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


def audit(run: Path, *, seed: int = 0, plain: bool = True) -> Report:
    """Read a run and test it; `plain`: also against plain sampling, if it has one turn."""
    with TemporaryDirectory(prefix="asyncrl-audit-") as scratch:
        return judge(read(run, Path(scratch)), seed=seed, plain=plain)


def judge(one: Material, *, seed: int = 0, plain: bool = True) -> Report:
    tokens, records, config = one.tokens, one.records, one.config
    n = config.scheduler.groups_per_step
    found = statements.sums(tokens, one.stops, {})
    found += statements.uniformity(tokens, seed)
    found += independence.correlations(tokens, seed, n)
    found += independence.repetitions(tokens)
    found.append(independence.shared_numbers(tokens))
    found += reference.statements(records, config, one.task)
    score = _arithmetic(one)
    if plain and config.environment.name is None:
        found += reference.compare(records, one.models, config, one.stops, score, seed)
    wrong = reference.faults(
        records, tokens, config, one.stops, None if score is None else _own(score)
    )
    with np.errstate(invalid="ignore"):
        worst = float(np.abs(tokens.recorded - reference.recomputed(tokens)).max())
    return Report(one.name, len(records), len(tokens), _counts(records), worst, found, wrong)


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


def _arithmetic(one: Material) -> reference.Score | None:
    """The built-in task's reward of a text; None for other tasks."""
    if [f.name for f in one.config.rewards.functions] != ["arithmetic"]:
        return None
    examples = {prompt.prompt_id: prompt.example for prompt in one.task.train}

    def score(record: TrainedSample, text: list[int]) -> float:
        response = one.task.tokenizer.decode(text, skip_special_tokens=True)
        return arithmetic("", response, examples[record.prompt_id])

    return score


def _own(score: reference.Score) -> reference.Reward:
    return lambda record: score(record, record.response_tokens or [])


def forget_versions(run: Path) -> None:
    """Remove the checkpoints of an audited run."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
