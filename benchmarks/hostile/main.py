"""10^6 hostile frames over all sockets of a live run, and a run that was left alone.

    python -m benchmarks.hostile [--quick] [--frames N] [--json FILE]

A repeatable run (`run.repeatable`) in processes of its own is attacked over every socket that it
has (`benchmarks.hostile.attack`), by peers that know the run's key and by strangers, while its own
controller adds nonsense to its messages. Then it is stopped, and a second run with the same
settings and as many steps is left alone. Four numbers say what the attack did:

    frames             sent, all of them while the run was training
    processes_ended    processes of the run that ended during the attack
    memory_growth_mb   growth of all processes' memory while the last nine tenths of the frames
                       were sent, less that of the run that was left alone in the same steps (with
                       the first tenth, queues and allocators reach their size)
    training_changed   0 if the records of all steps, times aside, and the weights at the end are
                       the same bytes in both runs

--quick: 10^6 frames, a few minutes on two quiet cores. In full: 10^7.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.monitoring.records.same_training import difference
from benchmarks.hostile.attack import Attack
from benchmarks.hostile.run import ROOT, START_SECONDS, Run, RunError
from benchmarks.report import add_smoke, write_json

CONFIG = ROOT / "examples" / "your_own" / "run.yaml"
WARM = 40
"""Steps before the attack begins, so that allocators have reached their size."""
SMOKE_WARM = 5
SMOKE_ALONE = ("launcher.generators=1",)
"""Other batches than with two generators, and the same training."""
GARBAGE = 5
"""Frames of nonsense that the controller adds to each of its messages."""
_RUN_SECONDS = 3600.0
SETTINGS = (
    "run.repeatable=true",
    "scheduler.on_update=keep",
    "scheduler.groups_per_step=16",
    "evaluation.prompts=4",
    "launcher.generators=2",
)


@dataclass
class Findings:
    """What the attack did."""

    frames: int = 0
    warm: int = WARM
    processes_ended: int = 0
    memory_growth_mb: float = 0.0
    training_changed: int = 0
    difference: str = ""
    """Between the two runs; empty if there is none."""
    steps: int = 0
    seconds: float = 0.0
    """Of the attack."""
    status_failed: int = 0
    """Whether `asyncrl status` was left without an answer after the attack."""
    sent: dict[str, int] = field(default_factory=dict)
    """By way."""
    refused: dict[str, int] = field(default_factory=dict)
    """By reason, as counted by the run."""
    memory_mb: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Of each run, by process, before the attack, after a tenth of it and at its end."""
    marks: list[int] = field(default_factory=list)
    """Steps done at these three times."""

    @property
    def unharmed(self) -> bool:
        """Whether no process ended, none was deaf, and training is the same."""
        return not (self.processes_ended or self.training_changed or self.status_failed)

    @property
    def held(self) -> bool:
        """Whether the promise of docs/operate.md was kept."""
        return self.unharmed and self.memory_growth_mb <= 20


def measure(frames: int, folder: Path, *, warm: int = WARM, alone: Sequence[str] = ()) -> Findings:
    """Both runs.

    Args:
        frames: to send.
        folder: for the model and the runs.
        warm: steps before the attack begins.
        alone: more settings of the run that is left alone, which must not change what it trains on.

    Raises:
        RunError: a run failed or did not get on.
    """
    model = folder / "model"
    runpy.run_path(str(CONFIG.parent / "make_model.py"))["make"](model)
    settings = [*SETTINGS, f"model.path={model}"]
    found = Findings(frames=frames, warm=warm)
    attacked = _attacked(found, folder, settings)
    apart = difference(attacked, _alone(found, folder, [*settings, *alone]))
    found.difference, found.training_changed = apart or "", int(apart is not None)
    growth = {
        name: sum(end.values()) - sum(tenth.values())
        for name, (_, tenth, end) in found.memory_mb.items()
    }
    found.memory_growth_mb = growth["attacked"] - growth["alone"]
    return found


def _attacked(found: Findings, folder: Path, settings: Sequence[str]) -> Path:
    endless = [*settings, "run.steps=1000000"]
    with Run(CONFIG, folder, "attacked", endless, garbage=GARBAGE) as run:
        run.warm_up(found.warm)
        processes, refused_before = run.processes(), run.refused()
        memory = found.memory_mb["attacked"] = []

        def look() -> None:
            found.marks.append(run.steps)
            memory.append(run.memory_mb())

        look()
        attack, began = Attack(run, seed=1), time.monotonic()
        attack.send(found.frames // 10)
        look()
        attack.send(found.frames - found.frames // 10)
        found.seconds = time.monotonic() - began
        found.processes_ended = len(processes - run.processes())
        found.status_failed = int(not run.answers())
        found.refused = dict(run.refused() - refused_before)
        found.sent = dict(attack.sent)
        look()
        run.stop(START_SECONDS)
        found.steps = run.steps
        return run.folder


def _alone(found: Findings, folder: Path, settings: Sequence[str]) -> Path:
    with Run(CONFIG, folder, "alone", [*settings, f"run.steps={found.steps}"]) as run:
        run.warm_up(found.warm)
        memory: dict[int, dict[str, float]] = {}

        def ended() -> bool:
            if (steps := run.steps) < found.steps:
                memory[steps] = run.memory_mb()
            return run.process.poll() is not None

        run.wait_for(ended, seconds=_RUN_SECONDS, what="its end")
        run.finish(START_SECONDS)
        found.memory_mb["alone"] = [
            memory[min(memory, key=lambda steps: abs(steps - mark))] for mark in found.marks
        ]
        return run.folder


def show(found: Findings) -> None:
    """Print the numbers."""
    print(f"{'frames':<20}{found.frames:>12,}   in {found.seconds:.0f} s")
    print(f"{'processes ended':<20}{found.processes_ended:>12}   (0)")
    print(f"{'memory growth, MB':<20}{found.memory_growth_mb:>12.1f}   (at most 20)")
    print(f"{'training changed':<20}{found.training_changed:>12}   (0)  {found.difference}")
    print(f"steps compared: {found.steps}; status answered: {not found.status_failed}")
    print("sent:    " + ", ".join(f"{way} {n:,}" for way, n in sorted(found.sent.items())))
    print("refused: " + ", ".join(f"{why} {n:,}" for why, n in sorted(found.refused.items())))


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack a run; 0 if everything that docs/operate.md promises held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="10^6 frames instead of 10^7")
    parser.add_argument("--frames", type=int, default=None, metavar="N", help="number of frames")
    parser.add_argument("--json", metavar="FILE", default=None, help="write the numbers as JSON")
    add_smoke(parser)
    args = parser.parse_args(arguments)
    frames = args.frames or (2000 if args.smoke else 10**6 if args.quick else 10**7)
    warm, alone = (SMOKE_WARM, SMOKE_ALONE) if args.smoke else (WARM, ())
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        try:
            found = measure(frames, Path(folder), warm=warm, alone=alone)
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    show(found)
    if args.json:
        ratios = {
            "frames": found.frames,
            "processes_ended": found.processes_ended,
            "memory_growth_mb": round(found.memory_growth_mb, 1),
            "training_changed": found.training_changed,
        }
        write_json(args.json, "hostile", vars(found), ratios, smoke=args.smoke)
    return 0 if found.held or (args.smoke and found.unharmed) else 1
