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

import asyncio
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.environments.protocol import (
    BadAnswerError,
    StepResult,
    checked_reset,
    checked_step,
)
from asyncrl.environments.registry import load_factory
from asyncrl.environments.translation import Translation
from asyncrl.environments.workers.messages import Failed, Open, Opened, Setup, Step, Stepped
from asyncrl.environments.workers.worker import Session
from asyncrl.generator.turns.conversation import Episode, Turn
from asyncrl.generator.turns.environment_setup import translation_of
from asyncrl.generator.turns.environment_turns import answered
from asyncrl.monitoring.records.trained_samples import TrainedSample, read_trained_samples
from asyncrl.rollout.trajectory import IntArray
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.prompts import Task
from benchmarks.harness import parser_of, pick, report, run_command, table
from benchmarks.tiny_models import smoke_settings

_TIMEOUT = 60.0
_CLOSE_TO = 1e-5
"""Rewards are float32 in the trainer."""


class _Ended(Exception):  # noqa: N818 - says what happens
    """The environment has failed, so the reward is 0."""


@dataclass(slots=True)
class Finding:
    """What a sample should have been rewarded with."""

    reward: float = 0.0
    failed: bool = False
    """The environment fails at one of its turns."""
    mismatch: str = ""
    """The tokens are not those of this environment's answers."""

    def is_of(self, sample: TrainedSample) -> bool:
        """Whether the sample has what it should."""
        near = abs(self.reward - sample.reward) <= _CLOSE_TO * max(1.0, abs(self.reward))
        return near and not self.mismatch


class Auditor:
    """Plays each turn of a sample in a fresh environment, whose answers must be what follows.

    Nothing of the run is used but the tokens: no pool, no verification, no going back. The
    environment must not need its seed, as that is not recorded.
    """

    def __init__(self, config: RunConfig, task: Task) -> None:
        if config.environment.name is None or config.rewards.functions or config.sampling.stop:
            raise ValueError("an environment's rewards are recomputed, without stop texts")
        self._config = config
        tokenizer = task.tokenizer
        self._translation: Translation = translation_of(
            config,
            tokenizer,
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            task.stop_tokens,
        )
        self._stops = np.array(task.stop_tokens, np.int32)
        self._rows: Mapping[str, dict[str, Any]] = {
            one.prompt_id: one.example for one in (*task.train, *task.evaluation)
        }
        environment = config.environment
        self._factory = load_factory(str(environment.name), dict(environment.args))

    async def wrong(self, samples: Iterable[TrainedSample]) -> list[tuple[TrainedSample, Finding]]:
        """The samples whose reward is not that of their tokens."""
        found = [(one, await self.examine(one)) for one in samples]
        return [(one, finding) for one, finding in found if not finding.is_of(one)]

    async def examine(self, sample: TrainedSample) -> Finding:
        setup = Setup("", {}, "", _TIMEOUT, _TIMEOUT)
        session, finding = Session(self._factory, setup), Finding()
        try:
            await self._play(session, sample, finding)
        except (_Ended, BadAnswerError):
            finding.reward, finding.failed = 0.0, True
        finally:
            await session.close()
        return finding

    async def _play(self, session: Session, sample: TrainedSample, finding: Finding) -> None:
        row = self._rows[sample.prompt_id]
        tokens = np.array(sample.response_tokens, np.int32)
        opened = await session.answer(Open(0, 0, row, 0))
        if not isinstance(opened, Opened):
            raise _Ended
        episode = self._begun(opened, row, sample, finding)
        turns = _Turns(tokens, self._stops)
        while (action := turns.next()) is not None:
            turn = await self._step(session, episode, action)
            episode.turns.append(turn)
            finding.reward += self._config.environment.reward_weight * turn.reward
            is_last = turn.done or len(episode.turns) >= self._config.environment.max_turns
            expected = turn.observed[:0] if is_last else turn.observed
            if not turns.take(expected, may_end=not turn.done):
                finding.mismatch = f"after turn {len(episode.turns)}"
                return

    def _begun(
        self, opened: Opened, row: dict[str, Any], sample: TrainedSample, finding: Finding
    ) -> Episode:
        first = checked_reset(opened.first)
        episode = Episode(0, row_prompt=np.array(sample.prompt_tokens, np.int32))
        episode.traits = opened.traits
        episode.conversation = self._translation.conversation(first, row)
        if first is not None or opened.traits.tools:
            episode.prompt = self._translation.prompt(episode.conversation, opened.traits.tools)
            if not np.array_equal(episode.prompt, episode.row_prompt):
                finding.mismatch = "in the prompt"
        return episode

    async def _step(self, session: Session, episode: Episode, tokens: IntArray) -> Turn:
        place = len(episode.turns)
        said = self._translation.action(tokens, episode.tools_before(place), place)
        answer = await session.answer(Step(0, 0, said))
        if isinstance(answer, Failed) or not isinstance(answer, Stepped):
            raise _Ended
        result: StepResult = checked_step(answer.result)
        turn = Turn(tokens, said.message, result.done, result.reward)
        return answered(turn, result, episode, self._translation)


class _Turns:
    """The turns of a response, one after the other; each ends with a stop token."""

    def __init__(self, tokens: IntArray, stops: IntArray) -> None:
        self._tokens = tokens
        self._ends = np.flatnonzero(np.isin(tokens, stops))
        self._place = 0

    def next(self) -> IntArray | None:
        """The next turn; None at the end, or if it was cut off before its end."""
        ends = self._ends[self._ends >= self._place]
        if not len(ends):
            return None
        begin, self._place = self._place, int(ends[0]) + 1
        return self._tokens[begin : self._place]

    def take(self, answer: IntArray, *, may_end: bool) -> bool:
        """Whether these tokens follow. The response may end instead: there was no room."""
        end = self._place + len(answer)
        if may_end and self._place == len(self._tokens):
            return True
        is_same = np.array_equal(self._tokens[self._place : end], answer)
        self._place = end
        return is_same and (len(answer) > 0 or end == len(self._tokens))


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
    options = parser_of(__doc__, "two cases, 8 steps").parse_args(arguments)
    cases, steps = pick(options, (CASES, 16), (CASES[:2], 8), (CASES[:1], 2))
    audits = []
    with tempfile.TemporaryDirectory(prefix="rewards-audit-") as folder:
        for case in cases:
            small = smoke_settings(Path(folder), "agent") if options.smoke else ()
            found, wrong = audit(case, steps, Path(folder), small)
            audits.append(found)
            for sample, finding in wrong[:_SHOWN]:
                print(_described(found.case, sample, finding))
    rows = ((o.case, o.samples, o.turns_verified, o.failed, o.wrong) for o in audits)
    shown = table("rewards, played again", "case,samples,verified,failed,wrong", rows)
    wrong_ones, total = sum(one.wrong for one in audits), sum(one.samples for one in audits)
    untested = [one.case for one in audits if not one.has_tested]
    if untested:
        print(f"nothing was tested by {', '.join(untested)}: none verified, or none failed")
    raw = {"cases": [asdict(one) for one in audits]}
    share = {"wrong_share": wrong_ones / max(1, total)}
    report(options, "rewards_audit", raw, share, shown)
    return 1 if wrong_ones or (untested and not options.smoke) else 0
