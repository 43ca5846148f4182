"""Do 10^6 hostile frames over all sockets of a live run change anything?

    python -m benchmarks.hostile [--quick] [--frames N] [--json FILE]

A repeatable run is attacked over every socket (`benchmarks.hostile.attack`), by peers that know the
run's key and by strangers, while its own controller adds nonsense to its messages. A second run
with the same settings and as many steps is left alone. `frames` were sent while the run trained;
`processes_ended` during the attack; `memory_growth_mb` while the second half of the frames
were sent, less that of the run left alone in the same steps; `training_changed` is 0 if the records
of all steps, times aside, and the final weights are the same bytes in both runs. --quick: 10^6
frames, a few minutes on two quiet cores. In full: 10^7.
"""

import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.monitoring.records.same_training import difference
from benchmarks.harness import parser_of, pick, report, table
from benchmarks.hostile.attack import ROOT, START_SECONDS, Attack, Run, RunError

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
    """Of each run, by process, before the attack, after half of it and at its end."""
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
    model = folder / "model"
    runpy.run_path(str(CONFIG.parent / "make_model.py"))["make"](model)
    settings = [*SETTINGS, f"model.path={model}"]
    found = Findings(frames=frames, warm=warm)
    attacked = _attacked(found, folder, settings)
    apart = difference(attacked, _alone(found, folder, [*settings, *alone]))
    found.difference, found.training_changed = apart or "", int(apart is not None)
    growth = {
        name: sum(end.values()) - sum(half.values())
        for name, (_, half, end) in found.memory_mb.items()
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
        attack.send(found.frames // 2)
        look()
        attack.send(found.frames - found.frames // 2)
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "10^6 frames instead of 10^7")
    parser.add_argument("--frames", type=int, metavar="N", help="number of frames")
    options = parser.parse_args(arguments)
    frames = options.frames or pick(options, 10**7, 10**6, 2000)
    warm, alone = (SMOKE_WARM, SMOKE_ALONE) if options.smoke else (WARM, ())
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        try:
            found = measure(frames, Path(folder), warm=warm, alone=alone)
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    ratios = {
        "frames": found.frames,
        "processes_ended": found.processes_ended,
        "memory_growth_mb": round(found.memory_growth_mb, 1),
        "training_changed": found.training_changed,
    }
    counts = [(f"{what} {why}", n) for what in ("sent", "refused")
              for why, n in sorted(getattr(found, what).items())]  # fmt: skip
    title = f"{found.steps} steps, {found.seconds:.0f} s; {found.difference or 'same training'}"
    report(options, "hostile", vars(found), ratios, table(title, "frames,number", counts))
    return 0 if found.held or (options.smoke and found.unharmed) else 1
