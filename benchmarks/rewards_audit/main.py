"""Recomputes the reward of every sample that a run has trained on, from its tokens.

    python -m benchmarks.rewards_audit [--quick] [--json FILE]

Each case is a real run of the guessing or the calculator example, with run-ahead and verification,
in which environments fail, reward every turn, and go back in the way that the case names. The
learning rate is too high on purpose: then verification discards many turns. A fresh environment in
this process then plays the turns of each sample. Exit code 1: a reward is wrong, or nothing was
tested, as no sample was verified or none failed.

--quick: guessing by replay and the calculator, 8 steps of 128 samples. In full also by restore, and
without going back, 16 steps.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncrl.config.run_config import load_config
from asyncrl.monitoring.records.trained_samples import TrainedSample, read_trained_samples
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import resolve_model
from benchmarks.report import add_smoke, write_json
from benchmarks.rewards_audit.recompute import Auditor, Finding
from benchmarks.run_command import run_command
from benchmarks.tiny_models import smoke_settings

ROOT = Path(__file__).resolve().parents[2]
GAMES = Path(__file__).with_name("games.py")
SETTINGS = (
    "rewards.on_error=zero",
    "run.log_samples=jsonl",
    "run.log_sample_tokens=true",
    "scheduler.on_update=verify",
    "trainer.learning_rate=3.0e-3",
    "evaluation.prompts=8",
    "evaluation.samples=1",
    "evaluation.max_unscored_share=0.9",
    "launcher.threads=1",
)
_SHOWN = 5


@dataclass(frozen=True)
class Case:
    example: str
    environment: str
    max_tokens: int
    """Few, so that some responses are cut off in a turn."""
    verifies: bool = True
    """False: its environment cannot go back, so its samples start over."""


CASES = (
    Case("guessing", "BrittleGuessing", 26),
    Case("calculator", "BrittleCalculator", 40),
    Case("guessing", "RestoredGuessing", 26),
    Case("guessing", "PlainGuessing", 26, verifies=False),
)


@dataclass
class Audit:
    case: str
    samples: int = 0
    turns_verified: int = 0
    """Samples with verified tokens."""
    failed: int = 0
    """Samples whose environment fails."""
    wrong: int = 0
    verifies: bool = True

    @property
    def has_tested(self) -> bool:
        """Whether there was anything that could be wrong."""
        return self.failed > 0 and (self.turns_verified > 0 or not self.verifies)


def audit(
    case: Case, steps: int, folder: Path, more: Sequence[str] = ()
) -> tuple[Audit, list[tuple[TrainedSample, Finding]]]:
    """Carry out a run and recompute its samples; the wrong ones are returned as well."""
    config_file = ROOT / "examples" / f"{case.example}.yaml"
    name = case.environment.lower()
    settings = (
        *SETTINGS,
        f"run.name={name}",
        f"run.directory={folder}",
        f"run.steps={steps}",
        f"environment.name={GAMES}:{case.environment}",
        f"sampling.max_tokens={case.max_tokens}",
        *more,
    )
    subprocess.run(run_command(config_file, settings), check=True, cwd=ROOT)
    config = load_config(folder / name / "config.yaml")
    model = resolve_model(config.model, None)
    task = load_task(config.task, model, config.run.seed, whole_rows=True)
    return asyncio.run(_examine(case, Auditor(config, task), folder / name / "samples"))


async def _examine(
    case: Case, auditor: Auditor, samples: Path
) -> tuple[Audit, list[tuple[TrainedSample, Finding]]]:
    found, wrong = Audit(case.environment, verifies=case.verifies), []
    for sample in read_trained_samples(samples):
        finding = await auditor.examine(sample)
        found.samples += 1
        found.turns_verified += sample.verified > 0
        found.failed += finding.failed
        if not finding.is_of(sample):
            found.wrong += 1
            wrong.append((sample, finding))
    return found, wrong


def _described(case: str, sample: TrainedSample, finding: Finding) -> str:
    return (
        f"wrong: {case}, step {sample.step}, sample {sample.group}.{sample.sample} "
        f"({sample.finish_reason}, {sample.verified} tokens verified): trained on "
        f"{sample.reward:g}, its tokens earn {finding.reward:g} {finding.mismatch}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two cases, 8 steps")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    add_smoke(parser)
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    cases, steps = (CASES[:2], 8) if options.quick else (CASES, 16)
    if options.smoke:
        cases, steps = CASES[:1], 2
    audits = []
    with tempfile.TemporaryDirectory(prefix="rewards-audit-") as folder:
        for case in cases:
            small = smoke_settings(Path(folder), "agent") if options.smoke else ()
            found, wrong = audit(case, steps, Path(folder), small)
            audits.append(found)
            for sample, finding in wrong[:_SHOWN]:
                console.print(_described(found.case, sample, finding))
    table = Table("case", "samples", "verified", "failed", "wrong")
    for one in audits:
        counts = one.samples, one.turns_verified, one.failed, one.wrong
        table.add_row(one.case, *(f"{count:,}" for count in counts))
    console.print(table)
    wrong_ones, total = sum(one.wrong for one in audits), sum(one.samples for one in audits)
    console.print(f"wrong rewards: {wrong_ones:,} of {total:,}")
    untested = [one.case for one in audits if not one.has_tested]
    if untested:
        console.print(f"nothing was tested by {', '.join(untested)}: none verified, or none failed")
    if options.json:
        raw = {"cases": [asdict(one) for one in audits]}
        write_json(
            options.json,
            "rewards_audit",
            raw,
            {"wrong_share": wrong_ones / max(1, total)},
            smoke=options.smoke,
        )
    return 1 if wrong_ones or (untested and not options.smoke) else 0
