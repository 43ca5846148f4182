"""Is each damaged model folder refused in one sentence, and each harmless one trained rightly?

    python -m benchmarks.model_folders [--quick] [--only NAME,NAME] [--json FILE]

A sound folder (`examples/your_own/make_model.py`) is damaged in each of the ways of
`benchmarks.damaged_models`, and given to `asyncrl run` as `model.path` or `trainer.critic.model`,
or to `asyncrl eval`. A harmful one is to be refused with exit code 1 or 2 and one sentence that
names the folder and what the damage's entry says, before any process of a run is started (NaN is
known only to the process that reads the weights). A harmless one is to be trained: exit code 0, one
step on-policy, and the entropy of the sound folder. Counted are `tracebacks` (or signals), `silent`
(harmful ones trained, harmless ones that became another model), `unnamed` (sentences that lack a
word, or are more than one), `not_trained` harmless ones, and refusals that are `late`. Exit code 1
unless all are 0. Refusals are made in a fork of this process; with --quick one folder is trained.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from asyncrl.monitoring.records.metrics_log import read_metrics
from benchmarks.damaged_models import DAMAGES, Damage
from benchmarks.harness import environment, overrides, parser_of, report, run_command

OWN = Path(__file__).parents[1] / "examples" / "your_own"
SECONDS = 300.0
"""Longest wait for a command."""
CPU_SECONDS = 30.0
"""Of a refusal."""
ENTROPY = 0.02
"""Largest difference of two steps that trained one model: bfloat16 weights are rounded."""
MISMATCH = 0.01
"""Largest difference of engine and trainer, in nats; the embedded engine rounds alike."""
SOUND = Damage("sound", lambda _: None, trains=True)
SMOKE = ("no output head", "pointer of Git LFS", "zero heads")
QUICK = ("consolidated beside",)
"""What is trained with `--quick`."""
_WORDS = 900
"""Characters of a sentence, its paths included."""


@dataclass(frozen=True)
class Answer:
    """What a command did with a folder."""

    code: int
    """Exit code; negative: the signal that ended it."""
    output: str
    cpu_seconds: float
    begun: bool
    """Processes of a run had been started."""
    entropy: float | None = None
    """Of the first step; None: there was none that is exact."""


@dataclass(frozen=True)
class Verdict:
    """What came of one folder. Empty words: nothing is wrong."""

    name: str
    said: str
    """The sentence."""
    tracebacks: str = ""
    silent: str = ""
    unnamed: str = ""
    not_trained: str = ""
    late: str = ""
    cpu_seconds: float = 0.0

    @property
    def faults(self) -> str:
        found = (self.tracebacks, self.silent, self.unnamed, self.not_trained, self.late)
        return "; ".join(filter(None, found))


KINDS = ("tracebacks", "silent", "unnamed", "not_trained", "late")


def judge(damage: Damage, folder: Path, answer: Answer, sound: float | None) -> Verdict:
    said = [line for line in answer.output.splitlines() if line.startswith("error:")]
    sentence = said[-1] if said else ""
    verdict = partial(Verdict, damage.name, sentence, cpu_seconds=answer.cpu_seconds)
    if "Traceback" in answer.output or answer.code < 0:
        last = answer.output.strip().splitlines()[-1:] or [f"signal {-answer.code}"]
        return verdict(tracebacks=f"a traceback: {last[0][:200]}")
    if damage.trains:
        missing = [word for word in damage.named if word not in answer.output]
        if answer.code or answer.entropy is None:
            return verdict(not_trained=f"was not trained: {sentence}")
        other = sound is not None and abs(answer.entropy - sound) > ENTROPY
        return verdict(
            silent=f"another model: entropy {answer.entropy:.3f} for {sound:.3f}" if other else "",
            unnamed=f"not said: {', '.join(missing)}" if missing else "",
        )
    if not answer.code:
        return verdict(silent="was not refused")
    missing = [word for word in (str(folder), *damage.named) if word not in sentence]
    wrong = [f"lacks {', '.join(missing)}"] if missing else []
    wrong += ["is not one sentence"] if len(said) != 1 or len(sentence) > _WORDS else []
    late = not damage.late and (answer.begun or answer.cpu_seconds > CPU_SECONDS)
    return verdict(
        unnamed=f"{'; '.join(wrong)}: {sentence or answer.output[-300:]!r}" if wrong else "",
        late=f"after {answer.cpu_seconds:.0f} s of CPU, begun: {answer.begun}" if late else "",
    )


def ratios_of(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """How many folders have each fault, and how many there are."""
    counts: dict[str, float] = {
        kind: sum(bool(getattr(one, kind)) for one in verdicts) for kind in KINDS
    }
    return {"folders": len(verdicts), **counts}


def measure(damages: Sequence[Damage], place: Path) -> list[Verdict]:
    """Give each damaged folder to its command."""
    make = runpy.run_path(str(OWN / "make_model.py"))["make"]
    make(place / "sound")
    _warm()
    sound = None
    if any(one.trains for one in damages):
        sound = _ask(SOUND, place / "sound", place).entropy
    verdicts = []
    for number, damage in enumerate(damages):
        folder = place / f"model-{number}"
        subprocess.run(["cp", "-a", place / "sound", folder], check=True)
        damage.change(folder)
        verdict = judge(damage, folder, _ask(damage, folder, place), sound)
        print(f"{damage.name:32} {verdict.faults or 'right'}", flush=True)
        verdicts.append(verdict)
        subprocess.run(["rm", "-r", folder], check=True)
    return verdicts


def _command(damage: Damage, folder: Path, place: Path) -> list[str]:
    settings = {
        "run.directory": place / "runs",
        "run.name": folder.name,
        "run.steps": 1,
        "model.path": place / "sound",
    }
    if damage.role == "critic":
        settings |= {"trainer.algorithm": "ppo", "trainer.critic.model": folder}
    elif damage.role == "policy":
        settings |= {"model.path": folder}
    pairs = [f"{key}={value}" for key, value in settings.items()]
    if damage.role != "eval":
        return run_command(OWN / "run.yaml", pairs)
    config = ("--config", str(OWN / "run.yaml"))
    return [sys.executable, "-m", "asyncrl", "eval", str(folder), *config, *overrides(pairs[:-1])]


def _ask(damage: Damage, folder: Path, place: Path) -> Answer:
    """Start the command of a folder, and wait for its end."""
    command = _command(damage, folder, place)
    log = place / f"{folder.name}.log"
    before = os.times()
    with log.open("wb") as output:
        if damage.trains or damage.late or damage.real:
            process = subprocess.Popen(
                command, cwd=OWN.parents[1], stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
            code = _wait(process.pid)
            process.returncode = code
        else:
            code = _wait(_forked(command[3:], output.fileno()))
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    run = place / "runs" / folder.name
    begun = run.exists() or bool(list(run.parent.glob(f"{run.name}.failed-*")))
    text = log.read_text(errors="replace")
    return Answer(code, text, spent, begun, _entropy(run))


def _entropy(run: Path) -> float | None:
    """The entropy of the first step of a run, if it was exactly on-policy."""
    steps = read_metrics(run / "metrics.jsonl")
    if not steps or steps[0].staleness.max or (steps[0].mismatch.abs_max or 0.0) > MISMATCH:
        return None
    return steps[0].learning.entropy


def _warm() -> None:
    """Import what commands do, so that forks need not."""
    import asyncrl.cli.entry
    import asyncrl.startup.prepare
    from asyncrl.startup import loading_trial

    with tempfile.TemporaryDirectory() as empty:
        loading_trial.load(Path(empty))  # imports transformers' models
    assert asyncrl.cli.entry
    assert asyncrl.startup.prepare


def _forked(arguments: Sequence[str], output: int) -> int:
    """Run a command of asyncrl in a fork of this process; its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child lacks
        child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(OWN.parents[1])
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the process ends with it
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["asyncrl", *arguments]
        from asyncrl.cli.entry import main as asyncrl
        from asyncrl.startup import loading_trial, model_check

        # It would be a process of its own, with five seconds of imports.
        model_check.tried = loading_trial.load
        asyncrl()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - what the interpreter would do
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int:
    """Its exit code; minus the signal that ended it. It is killed after `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.02)


def _chosen(options: argparse.Namespace) -> list[Damage]:
    if options.only:
        return [one for one in DAMAGES if one.name in options.only.split(",")]
    if options.smoke:
        return [one for one in DAMAGES if one.name in SMOKE]
    if options.quick:
        chosen = [one for one in DAMAGES if not (one.trains or one.late) or one.name in QUICK]
        return [replace(one, real=one.name in QUICK) for one in chosen]
    return list(DAMAGES)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "train one folder, refuse in forks")
    parser.add_argument("--only", metavar="NAME,NAME", help="only these damages")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="model-folders-") as place,
        environment(XDG_CACHE_HOME=f"{place}/cache"),  # no earlier trial counts
    ):
        verdicts = measure(_chosen(options), Path(place))
    ratios = ratios_of(verdicts)
    report(options, "model_folders", {"folders": [asdict(one) for one in verdicts]}, ratios)
    return int(any(ratios[kind] for kind in KINDS))


if __name__ == "__main__":
    sys.exit(main())
