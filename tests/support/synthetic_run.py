"""A run directory as a real run would leave it, made up from a seed and written by the real types.

`PYTHONPATH=. python tests/support/synthetic_run.py DIRECTORY` writes one with its
report, to look at.
"""

from __future__ import annotations

import math
import random
import sys
from contextlib import closing
from pathlib import Path

import msgspec
from fake_clock import FakeClock

from asyncrl.monitoring.metrics.occupancy import SlotLog
from asyncrl.monitoring.records.metrics_log import MetricsLog
from asyncrl.monitoring.records.samples import SampleLog, SampleRecord, SampleSegment
from asyncrl.monitoring.records.timeline import Timeline
from asyncrl.monitoring.report.write import write_report
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.step import (
    BatchMetrics,
    IdleShares,
    LearningMetrics,
    MismatchMetrics,
    RunResult,
    StalenessMetrics,
    StepGroups,
    StepMetrics,
    TokenCounts,
    TrainerTimes,
)

START = 1_795_000_000.0
CONFIG = """\
run:
  name: {name}
  steps: {steps}
  seed: 7
engine:
  kind: torch
  slots: 64
scheduler:
  max_off_policy_steps: 1
  on_update: keep
trainer:
  algorithm: grpo
  learning_rate: 3.0e-05
monitoring:
  report_samples: 6
"""


def make_run(
    folder: Path, *, steps: int = 60, generators: int = 2, finished: bool = True, seed: int = 0
) -> Path:
    """Write all files of a run of that many steps into `folder`."""
    random_ = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    name = "arithmetic-demo"
    (folder / "config.yaml").write_text(CONFIG.format(name=name, steps=steps))
    ends = _timelines(folder / "timeline", steps, generators, random_)
    totals = _metrics(folder / "metrics.jsonl", ends, random_)
    _samples(folder / "samples.jsonl", steps, random_)
    if finished:
        result = RunResult(
            run=name,
            engine="torch",
            steps=steps,
            wall_seconds=ends[-1] - START + 9.0,
            total_seconds=ends[-1] - START + 30.0,
            tokens=totals,
            staleness=StalenessMetrics(mean=0.61, max=1),
            exactly_on_policy=False,
            accuracy_before=0.664,
            accuracy_after=0.859,
            evaluation_samples=256,
        )
        (folder / "result.json").write_bytes(msgspec.json.encode(result))
    return folder


def _timelines(folder: Path, steps: int, generators: int, random_: random.Random) -> list[float]:
    """Write lanes; return the moments (unix seconds) at which steps finished."""
    ends: list[float] = []
    train = [1.6 + 0.3 * random_.random() for _ in range(steps)]
    wait = [0.5 + 0.7 * random_.random() for _ in range(steps)]
    ready, evaluated = 8.0, 19.0
    fake = FakeClock(100.0)
    with closing(
        Timeline(folder / "trainer.jsonl", "trainer", clock=fake.clock(START - 100.0))
    ) as line:
        line.record("starting", 100.0, 100.0 + ready)
        line.record("waiting", 100.0 + ready, 100.0 + evaluated, **{"for": "evaluation"})
        at = 100.0 + evaluated
        for step in range(steps):
            line.record("waiting", at, at + wait[step], **{"for": "trajectories"}, step=step)
            at += wait[step]
            line.record("training", at, at + train[step], step=step)
            at += train[step]
            line.record("transferring_weights", at, at + 0.08, step=step)
            at += 0.08
            ends.append(START - 100.0 + at)
            fake.now = at
        line.record("waiting", at, at + 9.0, **{"for": "evaluation"})
    for index in range(generators):
        _generator(folder, f"generator-{index}", ends, ready + index, evaluated, random_)
    return ends


def _generator(
    folder: Path,
    name: str,
    ends: list[float],
    ready: float,
    evaluated: float,
    random_: random.Random,
) -> None:
    fake = FakeClock(100.0)
    with closing(Timeline(folder / f"{name}.jsonl", name, clock=fake.clock(START - 100.0))) as line:
        line.record("starting", 100.0, 100.0 + ready)
        line.record("evaluating", 100.0 + ready, 100.0 + evaluated - 0.4)
        at = 100.0 + evaluated - 0.3
        slots = SlotLog(folder.parent / "slots" / f"{name}.jsonl")
        for step, end in enumerate(ends):
            until = end - START + 100.0
            _slots(slots, at + START - 100.0, end)
            while at < until - 0.5:
                busy = min(until - at - 0.1, 0.3 + 0.4 * random_.random())
                line.record("generating", at, at + busy)
                line.record("rewarding", at + busy, at + busy + 0.03)
                at += busy + 0.03
            line.record(
                "waiting", at, until + 0.02, **{"for": "weights" if step % 3 else "admission"}
            )
            line.record("transferring_weights", until + 0.02, until + 0.07)
            at = until + 0.07
            fake.now = at
        slots.close()
        line.record("evaluating", at, at + 8.5)


def _slots(log: SlotLog, start: float, end: float) -> None:
    """One step: verification of run-ahead work, then fewer and fewer due samples, and run-ahead."""
    size = (end - start) / 10
    for part in range(10):
        due = 64 - 7 * part
        used = {"primary": due, "run_ahead": (64 - due) // 2}
        if part == 0:
            used = {"verifying": 60}
        log.add(start + part * size, start + (part + 1) * size, 64, used)


def _metrics(path: Path, ends: list[float], random_: random.Random) -> TokenCounts:
    generated = drafted = accepted = 0
    counts = TokenCounts()
    log = MetricsLog(path)
    for step, end in enumerate(ends):
        tokens = round(8600 + 700 * random_.gauss(0, 1))
        share = 0.62 * (1 - math.exp(-step / 14)) * (0.95 + 0.1 * random_.random())
        generated += tokens
        accepted += round(tokens * share)
        drafted += round(tokens * share * 1.25)
        seconds = end - (ends[step - 1] if step else START + 19.0)
        growth = 1 - math.exp(-step / 25)
        counts = TokenCounts(
            generated=generated,
            drafted=drafted,
            accepted=accepted,
            verified=accepted // 2,
            rejected=accepted // 20,
        )
        log.append(
            StepMetrics(
                step=step,
                time=end,
                groups=StepGroups(trained=tuple(range(16 * step, 16 * step + 16))),
                wall_seconds=end - START,
                step_seconds=seconds,
                tokens_per_second=tokens / seconds,
                engine_busy_seconds=0.9 * (end - START),
                tokens=counts,
                noise_floor=NoiseFloor(
                    samples=step,
                    cut_samples=step // 30,
                    judged=70 * step,
                    rejected=20 * (step // 30),
                    abs_mean=1.3e-7,
                ),
                idle=IdleShares(
                    generator=0.05 + 0.02 * random_.random(), trainer=0.27 + 0.03 * random_.random()
                ),
                times=TrainerTimes(
                    train_seconds=seconds * 0.68,
                    publish_seconds=0.08,
                    wait_seconds=seconds * 0.27,
                    wait_first_seconds=seconds * 0.2,
                    wait_last_seconds=seconds * 0.05,
                ),
                learning=LearningMetrics(
                    reward_mean=min(1.0, 0.66 + 0.2 * growth + 0.03 * random_.gauss(0, 1)),
                    reward_std=0.42 - 0.001 * step,
                    loss=0.02 * random_.gauss(0, 1),
                    grad_norm=0.6 + 0.1 * random_.gauss(0, 1),
                    learning_rate=3e-5,
                    entropy=0.31 - 0.001 * step + 0.004 * random_.gauss(0, 1),
                ),
                batch=BatchMetrics(
                    groups=16,
                    samples=128,
                    tokens=tokens,
                    tokens_computed=tokens,
                    response_length_mean=67 + 2 * random_.gauss(0, 1),
                ),
                staleness=StalenessMetrics(
                    mean=0.6 + 0.1 * random_.gauss(0, 1) if step else 0.0, max=1 if step else 0
                ),
                mismatch=MismatchMetrics(
                    abs_mean=2e-2,
                    abs_max=0.4,
                    kl=0.0006 + 0.0002 * random_.random(),
                    fresh_abs_mean=1.2e-6 * (1 + 0.1 * random_.random()),
                    fresh_kl=1e-11,
                    ratio_mean=1.0,
                    ratio_max=1.5,
                    outside_nucleus=0.0,
                ),
                algorithm={
                    "clip_ratio": 0.003 + 0.001 * random_.random(),
                    "importance_capped": 0.0,
                },
            )
        )
    log.close()
    return counts


def _samples(path: Path, steps: int, random_: random.Random) -> None:
    log = SampleLog(path)
    for step in range(0, steps, max(1, steps // 8)):
        a, b = random_.randint(1000, 99999), random_.randint(1000, 99999)
        right = random_.random() < 0.8
        answer = a + b if right else a + b + 10
        units = f"{a % 10}+{b % 10}={a % 10 + b % 10}, carry."
        text = f"{a}+{b}: write them one under the other.\n{units}\nThe sum is {answer}"
        tokens = [*text, "<eos>"]
        kept = len(tokens) // 3 if step else 0
        provenance = [
            "verified"
            if i < kept // 2
            else "drafted"
            if step and random_.random() < 0.6
            else "sampled"
            for i in range(len(tokens))
        ]
        segments = [SampleSegment(step, kept, len(tokens))]
        if kept:
            segments.insert(0, SampleSegment(max(0, step - 1), 0, kept))
        log.append(
            SampleRecord(
                step=step,
                prompt=f"What is {a} + {b}?",
                tokens=tokens,
                provenance=provenance,
                segments=segments,
                reward=float(right),
                answer=str(a + b),
                logprobs=[-0.4 * random_.random() for _ in tokens],
                sample_id=f"{step * 16 + 3}.{random_.randint(0, 7)}",
                finish_reason="stop" if right else "length",
            )
        )
    log.close()


if __name__ == "__main__":
    print(write_report(make_run(Path(sys.argv[1]))))
