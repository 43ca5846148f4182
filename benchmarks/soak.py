"""Does a run that is steered for an hour lose anything, and does anything grow?

    python -m benchmarks.soak [--minutes 60] [--quick] [--json FILE]

A tiny Llama (`examples/your_own`) trains, verified and with run-ahead, and gets orders all the
time: settings change, generators come and leave, it is paused and continued, writes checkpoints,
and evaluates. It is stopped when both the minutes and the steps are reached: 60 and 10,000, with
--quick 5 and 500. From its files and /proc: `ended` processes without an order; `lost`, `twice` and
`failed` groups; `memory_growth_mb` and `descriptor_growth` of the process that grew most, medians
of the last quarter less those of the first, after the first tenth of the steps, taken while one
generator runs and nothing is paused. Exit code 1 unless counts are 0 and growth is within limits.
"""

import contextlib
import itertools
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.launch.identity import ProcessIdentity, identity_of, is_running
from asyncrl.monitoring.records.group_account import GroupAccount, read_account
from asyncrl.steering.control_socket import ask
from asyncrl.wire.messages import control
from benchmarks.chaos.live_run import ChaosError, LiveRun, Setup
from benchmarks.harness import own_bytes, parser_of, pick, report, table

OWN = Path(__file__).parents[1] / "examples" / "your_own"
SETTINGS = (
    *("launcher.generators=1", "scheduler.on_update=verify", "scheduler.max_off_policy_steps=0"),
    "scheduler.max_runahead_groups=8",
    *("evaluation.every=40", "evaluation.prompts=4", "trainer.checkpoint_every=200"),
    *("trainer.learning_rate=1e-5", "monitoring.live=off"),
    "cache.max_bytes=2097152",  # full after some 200 steps: what it may take is no growth
)
MEMORY_MB, DESCRIPTORS = 20.0, 2
"""How much a process may grow by."""
_STEPS_BETWEEN = 3
"""Finished steps between two orders."""
_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Extent:
    minutes: float
    steps: int


FULL, QUICK, SMOKE = Extent(60.0, 10_000), Extent(5.0, 500), Extent(0.0, 20)


@dataclass(frozen=True)
class Sample:
    step: int
    own_bytes: int
    descriptors: int


@dataclass
class Grown:
    names: dict[ProcessIdentity, str] = field(default_factory=dict)
    samples: dict[ProcessIdentity, list[Sample]] = field(default_factory=dict)

    def note(self, name: str, process: ProcessIdentity, step: int) -> None:
        """Take a sample of a process, if it has not ended."""
        with contextlib.suppress(OSError):
            open_files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            sample = Sample(step, own_bytes(process.pid), open_files)
            self.names[process] = name
            self.samples.setdefault(process, []).append(sample)

    def growth(self, steps: int) -> dict[str, tuple[float, float]]:
        """MB and descriptors by which each process grew that lived through, by name and pid."""
        found = {}
        for process, samples in self.samples.items():
            judged = [one for one in samples if one.step >= steps / 10]
            # Of those that came later or left, growth is their start or their end.
            if not judged or judged[0].step > steps / 4 or judged[-1].step < 3 * steps / 4:
                continue
            quarter = max(1, len(judged) // 4)
            first, last = judged[:quarter], judged[-quarter:]
            found[f"{self.names[process]} ({process.pid})"] = (
                (_median(last, "own_bytes") - _median(first, "own_bytes")) / 1e6,
                _median(last, "descriptors") - _median(first, "descriptors"),
            )
        return found


def _median(samples: Sequence[Sample], what: str) -> float:
    return statistics.median(getattr(one, what) for one in samples)


@dataclass
class Outcome:
    steps: int
    minutes: float
    orders: dict[str, int]
    ended: list[str]
    account: GroupAccount
    growth: dict[str, tuple[float, float]]
    staleness_max: int = 0
    evaluations: int = 0

    def ratios(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "minutes": self.minutes,
            "orders": sum(self.orders.values()),
            "evaluations": self.evaluations,
            "ended": len(self.ended),
            "lost": len(self.account.lost),
            "twice": len(self.account.twice),
            "failed": len(self.account.failed),
            "staleness_max": self.staleness_max,
            "memory_growth_mb": max((one[0] for one in self.growth.values()), default=0.0),
            "descriptor_growth": max((one[1] for one in self.growth.values()), default=0.0),
        }


def holds(ratios: Mapping[str, float]) -> bool:
    """Whether all is as it must be."""
    zeros = ("ended", "lost", "twice", "failed", "staleness_max")
    return (
        not any(ratios[name] for name in zeros)
        and ratios["memory_growth_mb"] <= MEMORY_MB
        and ratios["descriptor_growth"] <= DESCRIPTORS
    )


class Soak:
    """The run, the orders that it gets, and what is known of its processes."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self.orders: dict[str, int] = {}
        self.ended: list[str] = []
        self.grown = Grown()
        self._known: dict[ProcessIdentity, str] = {}
        self._leaving = 0
        """Generators that were ordered to leave and have not ended yet."""

    @property
    def step(self) -> int:
        """Steps finished so far, by the size of the record."""
        return self._count

    def go_on(self, extent: Extent) -> None:
        """Give orders until minutes and steps are reached."""
        began = time.monotonic()
        self._count = 0
        self._steps(_STEPS_BETWEEN)
        orders: Sequence[Callable[[int], None]] = (
            *(self._set_rate, self._scale, self._pause, self._checkpoint, self._back),
            *(self._set_evaluation, self._note),
        )
        for turn in itertools.count():
            for order in orders:
                order(turn)
                self._steps(_STEPS_BETWEEN)
            if self._count >= extent.steps and time.monotonic() - began >= 60 * extent.minutes:
                return

    def look(self) -> None:
        """Note which processes have ended without an order, and which are new."""
        for process in [one for one in self._known if not is_running(one)]:
            name = self._known.pop(process)
            if name.startswith("generator") and self._leaving:
                self._leaving -= 1
            else:
                self.ended.append(f"{name} before step {self._count}")
        for record in self._run.children():
            if is_running(record.process):
                self._known.setdefault(record.process, record.name)

    def _steps(self, number: int) -> None:
        """Wait until so many more steps are finished."""
        for _ in range(number):
            last = self._run.last_step_at()
            self._run.until(lambda last=last: self._run.last_step_at() > last, "a step")  # type: ignore[misc]
        self._count = self._run.last_step() + 1
        self.look()

    def _order(self, request: control.Request) -> None:
        name = type(request).__name__.removesuffix("Request").lower()
        reply = ask(self._run.path, request)
        if not isinstance(reply, control.Accepted):
            raise self._run.error(f"did not take the order {request}: {reply}")
        self.orders[name] = self.orders.get(name, 0) + 1

    def _generators(self) -> list[ProcessIdentity]:
        self.look()
        return [one for one, name in self._known.items() if name.startswith("generator")]

    def _set_rate(self, turn: int) -> None:
        self._order(control.SetRequest("trainer.learning_rate", f"{1 + turn % 3}e-5"))

    def _set_evaluation(self, turn: int) -> None:
        self._order(control.SetRequest("evaluation.every", str(30 + 10 * (turn % 3))))

    def _scale(self, turn: int) -> None:
        del turn
        self._order(control.ScaleRequest(2))
        self._run.until(lambda: len(self._generators()) == 2, "a second generator")

    def _back(self, turn: int) -> None:
        del turn
        self._leaving += 1
        self._order(control.ScaleRequest(1))
        self._run.until(lambda: len(self._generators()) == 1, "the end of a generator")

    def _pause(self, turn: int) -> None:
        del turn
        self._order(control.PauseRequest())
        time.sleep(_PAUSE_SECONDS)
        self._order(control.ResumeRequest())

    def _checkpoint(self, turn: int) -> None:
        del turn
        self._order(control.CheckpointRequest())

    def _note(self, turn: int) -> None:
        del turn
        if (controller := identity_of(self._run.controller)) is not None:
            self.grown.note("controller", controller, self._count)
        for process in self._run.descendants():
            self.grown.note(self._known.get(process, "helper"), process, self._count)


def measure(extent: Extent, folder: Path) -> Outcome:
    """Carry out the run. Raises ChaosError: it ended, or did not get on."""
    runpy.run_path(str(OWN / "make_model.py"))["make"](folder / "model")
    settings = (f"model.path={folder / 'model'}", *SETTINGS)
    run = LiveRun(Setup(OWN / "run.yaml", folder, settings), "soak", 1_000_000)
    soak = Soak(run)
    run.start()
    try:
        run.until(lambda: run.last_step_at() > 0, "its first step")
        began = time.monotonic()
        soak.go_on(extent)
        minutes = (time.monotonic() - began) / 60
        soak.look()
        code = run.end()
    finally:
        run.abandon()
    if code:
        soak.ended.append(f"the controller, with exit code {code}")
    steps = run.records()
    return Outcome(
        steps=len(steps),
        minutes=minutes,
        orders=soak.orders,
        ended=soak.ended,
        account=read_account(run.path),
        growth=soak.grown.growth(len(steps)),
        staleness_max=max(one.staleness.max for one in steps),
        evaluations=(run.path / "evaluations.jsonl").read_text().count("\n"),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "5 minutes and 500 steps")
    parser.add_argument("--minutes", type=float, help="at least so many, instead of 60 or 5")
    options = parser.parse_args(arguments)
    extent = pick(options, FULL, QUICK, SMOKE)
    extent = Extent(options.minutes or extent.minutes, extent.steps)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            outcome = measure(extent, Path(folder))
        except ChaosError as error:
            print(error)
            return 1
    grown = ((name, *both) for name, both in outcome.growth.items())
    ratios, raw = (
        outcome.ratios(),
        {
            "wanted_minutes": extent.minutes,
            "wanted_steps": extent.steps,
            "orders": outcome.orders,
            "ended": outcome.ended,
            "growth_mb_and_descriptors": outcome.growth,
        },
    )
    print(*outcome.ended, sep="\n")
    report(options, "soak", raw, ratios, table("growth", "process,MB,open files", grown))
    return int(not holds(ratios))


if __name__ == "__main__":
    sys.exit(main())
