"""Does each fault of a real run raise its alerts in a real Prometheus, and no others?

    python -m benchmarks.alerts [--quick] [--only "full disk"] [--json FILE]

The rules are those of monitoring/rules with all times divided by --faster. It fails if an alert
does not fire, if one fires in healthy time, or if one fires that does not follow from the fault.
All take about 20 minutes; --quick is a healthy run and two faults. The full disk needs the right to
mount.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import yaml
import zmq

from asyncrl.launch.identity import send
from asyncrl.monitoring.rules.__main__ import RULES
from asyncrl.runs.directory import read_state
from benchmarks.alerts.switch import VARIABLE
from benchmarks.chaos.live_run import ChaosError, LiveRun, Setup
from benchmarks.harness import overrides, parser_of, report, table
from benchmarks.tiny_models import smoke_settings
from benchmarks.watching_prometheus import Prometheus, watching

DISK = "64m"
"""Size of the disk that is filled."""


@dataclass(frozen=True)
class Fault:
    """One fault. With nothing to strike with, the children inject it.

    They are `child`, `reward` and `environment`.
    """

    name: str
    alerts: frozenset[str]
    """That have to fire."""
    follow: frozenset[str] = frozenset()
    """That may fire too, since they are right."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE of this run."""
    strike: Callable[[LiveRun, Path], None] | None = None
    """Called with the run and the folder of its disk."""
    keeps_striking: bool = False
    from_start: bool = False
    """The settings are the fault, so there is no healthy time before it."""
    small_disk: bool = False


def kill_controller(run: LiveRun, _disk: Path) -> None:
    run.kill()


def kill_generators(run: LiveRun, _disk: Path) -> None:
    """SIGKILL for each generator that there is now."""
    for record in run.children():
        if record.name.startswith("generator"):
            send(record.process, signal.SIGKILL)


def fill(_run: LiveRun, disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def knock(run: LiveRun, _disk: Path) -> None:
    """Speak to the controller without a key."""
    state = read_state(run.path)
    assert state is not None
    sockets = Path(state.control_address.removeprefix("ipc://")).parent
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.SNDTIMEO, 1000)
    peer.connect(f"ipc://{sockets / 'control'}")
    for _ in range(20):
        with contextlib.suppress(zmq.ZMQError):
            peer.send(b"open")
        time.sleep(0.1)
    peer.close(linger=0)
    context.term()


@contextlib.contextmanager
def mounted(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "asyncrl-alerts", str(path)], check=True
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _names(*short: str) -> frozenset[str]:
    return frozenset(f"Asyncrl{one}" for one in short)


_STALLED = _names("StepOverdue", "PhaseOverdue", "GeneratorIdle", "TrainerIdle")

_ENVIRONMENT = ("environment.name=benchmarks/alerts/environment.py:OneTurn", "rewards.functions=[]")
"""Settings of a run whose samples an environment judges."""

FAULTS = (
    Fault("killed controller", _names("ProcessDown"), strike=kill_controller),
    Fault(
        "generators killed again and again",
        _names("NoGeneratorReady", "ProcessesRestart", "GroupsFail"),
        follow=_STALLED | _names("ProcessDown"),
        settings=("scheduler.max_attempts=1",),
        strike=kill_generators,
        keeps_striking=True,
    ),
    Fault("hanging reward", _names("StepOverdue", "PhaseOverdue"), follow=_STALLED),
    Fault(
        "slow reward",
        _names("GeneratorIdle", "TrainerIdle"),
        follow=_STALLED,
        settings=("scheduler.groups_per_step=1",),
    ),
    Fault("slow trainer", _names("PhaseOverdue", "GeneratorIdle"), follow=_STALLED),
    Fault(
        "wrong weights",
        _names("WrongPolicy", "LogprobMismatch"),
        follow=_names("RejectedShareJumped", "NothingToLearn", "AnswersTruncated"),
        # Of groups without signal no log-probability is computed otherwise.
        settings=("trainer.skip_zero_variance_groups=false",),
    ),
    Fault(
        "policy that runs away",
        _names("RejectedShareJumped"),
        follow=_names("NothingToLearn", "AnswersTruncated"),
    ),
    Fault("engine that scores badly", _names("NoiseFloorHigh")),
    Fault("constant reward", _names("NothingToLearn")),
    Fault(
        "answers that are cut off",
        _names("AnswersTruncated"),
        follow=_names("NothingToLearn"),
        settings=("sampling.max_tokens=6",),
        from_start=True,
    ),
    Fault("reward that fails", _names("RewardErrors")),
    Fault("environment that fails", _names("EnvironmentErrors"), settings=_ENVIRONMENT),
    Fault(
        "slow environment",
        _names("EnvironmentsSlow"),
        follow=_STALLED,
        settings=(*_ENVIRONMENT, "environment.sessions=16"),
    ),
    Fault("environment that cannot go back", _names("SamplesStartOver"), settings=_ENVIRONMENT),
    Fault(
        "full disk",
        _names("CheckpointFailed", "CheckpointOverdue", "DiskFull", "SampleLogIncomplete"),
        strike=fill,
        small_disk=True,
    ),
    Fault("stranger at a socket", _names("StrangersRefused"), strike=knock),
)
NOT_INJECTED = {
    "AsyncrlKvFull": "the torch engine reserves KV space for each slot, so nothing waits for it"
}
"""By alert: why no fault here raises it."""


ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "arithmetic.yaml"
HEALTHY = "healthy"
QUICK = (HEALTHY, "constant reward", "stranger at a socket")
SETTINGS = (
    "scheduler.groups_per_step=4",
    "engine.slots=16",
    "trainer.learning_rate=5.0e-5",
    "trainer.checkpoint_every=5",
    "trainer.keep_checkpoints=2",
    "evaluation.prompts=1",
    "launcher.threads=1",
    "launcher.max_restarts=1000",
    "run.on_wrong_policy=warn",
    "run.log_samples=jsonl",
    "rewards.functions=[{name: benchmarks/alerts/reward.py:score}]",
    "rewards.on_error=zero",
    "rewards.timeout_seconds=3600",
)
STEPS = 1_000_000
_POLL_SECONDS = 0.5


@dataclass
class Finding:
    fault: str
    expected: frozenset[str]
    follow: frozenset[str] = frozenset()
    before: set[str] = field(default_factory=set)
    """Alerts that fired while the run was healthy."""
    fired: dict[str, float] = field(default_factory=dict)
    """By alert: seconds after the fault."""
    error: str = ""

    @property
    def missing(self) -> set[str]:
        return set(self.expected) - set(self.fired)

    @property
    def wrong(self) -> set[str]:
        return self.before | (set(self.fired) - self.expected - self.follow)

    @property
    def is_right(self) -> bool:
        """Whether all and only the right ones fired."""
        return not (self.missing or self.wrong or self.error)


class SwitchedRun(LiveRun):
    """A run whose children have a switch for faults, and whose output is on another disk."""

    scratch: Path

    @property
    def switch(self) -> Path:
        return self.scratch / "fault"

    @property
    def _log(self) -> Path:
        return self.scratch / "run.log"

    def _begin(
        self, settings: tuple[str, ...], more: tuple[str, ...], output: BinaryIO
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.alerts.command", "run", str(CONFIG)]
        return subprocess.Popen(
            [*command, "--end-with", str(os.getpid()), *more, *overrides(settings)],
            cwd=ROOT,
            env=os.environ | {VARIABLE: str(self.switch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@dataclass(frozen=True)
class Patience:
    """How long is waited for what, in seconds."""

    healthy: float
    """Without a fault, before one is injected."""
    alert: float
    """For all alerts of a fault."""
    faster: float
    """By how much the rules are faster."""


def examine(fault: Fault | None, patience: Patience, *, small: bool = False) -> Finding:
    """One run with one fault; None: without any. `small`: of a model in miniature."""
    name = HEALTHY if fault is None else fault.name
    finding = Finding(name, fault.alerts if fault else frozenset())
    if fault is not None:
        finding.follow = fault.follow
    with contextlib.ExitStack() as closing:
        scratch = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="alerts-")))
        runs = scratch / "runs"
        if fault is not None and fault.small_disk:
            closing.enter_context(mounted(runs))
        else:
            runs.mkdir()
        settings = SETTINGS + (fault.settings if fault else ())
        settings += tuple(smoke_settings(scratch)) if small else ()
        run = SwitchedRun(Setup(CONFIG, runs, settings, 600.0), "watched", STEPS)
        run.scratch = scratch
        prometheus = closing.enter_context(
            watching(runs, scratch / "prometheus", faster_by=patience.faster)
        )
        closing.callback(run.abandon)
        try:
            run.start()
            run.until(lambda: len(run.records()) >= 6 if run.last_step_at() else False, "steps")
            if fault is None or not fault.from_start:
                finding.before = _watch_healthy(prometheus, run, patience.healthy)
            if fault is not None:
                _strike(fault, run, runs, prometheus, finding, patience)
        except (ChaosError, subprocess.CalledProcessError) as error:
            finding.error = str(error)
    return finding


def _watch_healthy(prometheus: Prometheus, run: LiveRun, seconds: float) -> set[str]:
    """The alerts that fire in this time."""
    seen: set[str] = set()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        seen |= prometheus.firing()
        if run.exit_code() is not None:
            raise run.error("ended")
        time.sleep(_POLL_SECONDS)
    return seen


def _strike(
    fault: Fault,
    run: SwitchedRun,
    disk: Path,
    prometheus: Prometheus,
    finding: Finding,
    patience: Patience,
) -> None:
    """Inject it, and note which alerts fire until all of its own have."""
    began = time.monotonic()

    def look() -> None:
        for alert in prometheus.firing():
            finding.fired.setdefault(alert, time.monotonic() - began)

    if fault.strike is None:
        run.switch.write_text(fault.name, encoding="utf-8")
    else:
        fault.strike(run, disk)
    while finding.missing and time.monotonic() < began + patience.alert:
        look()
        if fault.strike is not None and fault.keeps_striking:
            fault.strike(run, disk)
        time.sleep(_POLL_SECONDS)
    look()


def rows_of(one: Finding) -> list[tuple[str, str, str]]:
    """Fault, alert, and when it fired."""
    rows = [
        (one.fault, alert, f"{one.fired[alert]:.0f} s" if alert in one.fired else "not")
        for alert in sorted(one.expected)
    ] or [(one.fault, "none", ", ".join(sorted(one.before)) or "nothing")]
    more = sorted(set(one.fired) & (one.follow - one.expected))
    said = {"followed by": more, "WRONG": sorted(one.wrong), "FAILED": one.error.splitlines()[:1]}
    return rows + [("", what, ", ".join(which)) for what, which in said.items() if which]


def untested(findings: list[Finding]) -> list[str]:
    """Sentences about the alerts that did not fire in any of these runs."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    every = {rule["alert"] for group in rules for rule in group["rules"] if "alert" in rule}
    seen = {alert for one in findings for alert in one.fired}
    return [
        f"not seen: {alert}" + (f" ({NOT_INJECTED[alert]})" if alert in NOT_INJECTED else "")
        for alert in sorted(every - seen)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, f"only {', '.join(QUICK)}")
    names = (HEALTHY, *(one.name for one in FAULTS))
    parser.add_argument("--only", action="append", choices=names, help="this fault; repeatable")
    parser.add_argument("--faster", type=float, default=30.0, help="divide times of rules by this")
    parser.add_argument("--healthy-seconds", type=float, default=20.0, help="before each fault")
    parser.add_argument("--alert-seconds", type=float, default=240.0, help="wait for the alerts")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.only, options.healthy_seconds = [HEALTHY], 0.2
    if shutil.which("prometheus") is None:
        parser.error("Prometheus is not installed (Debian: apt-get install prometheus)")
    chosen = set(options.only or (QUICK if options.quick else names))
    findings = []
    for fault in (None, *FAULTS):
        if (HEALTHY if fault is None else fault.name) not in chosen:
            continue
        healthy = options.healthy_seconds * (6 if fault is None else 1)
        patience = Patience(healthy, options.alert_seconds, options.faster)
        findings.append(examine(fault, patience, small=options.smoke))
        print(*rows_of(findings[-1]), findings[-1].error, sep="\n", flush=True)
    if chosen == set(names):
        print(*untested(findings), sep="\n")
    raw = {one.fault: {"fired": one.fired, "wrong": sorted(one.wrong)} for one in findings}
    rows = (row for one in findings for row in rows_of(one))
    right = {"right": sum(one.is_right for one in findings)}
    report(options, "alerts", raw, right, table("alerts", "fault,alert,fired after", rows))
    return 0 if all(one.is_right for one in findings) else 1
