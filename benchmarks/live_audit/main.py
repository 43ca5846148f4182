"""Whether real runs train on draws of the policies that they say, by the gradients that they say.

    python -m benchmarks.live_audit [--quick] [--runs "arithmetic;guessing"] [--engine torch]
                                    [--steps N] [--seed S] [--set KEY=VALUE] [--json FILE]
    python -m benchmarks.live_audit --run runs/NAME

Each run is `asyncrl run` in processes of its own: run-ahead, drafts from the cache, verification,
partial rollouts, environments, evaluations, and what is killed. Then the distribution of every
trained token is computed again from the checkpoint of its version with plain transformers, and
everything that must have mean 0 is summed (`statements`), samples are tested for independence
(`independence`), rewards are computed again from the tokens (`rewards`), and each step's loss,
gradient and update from its samples (`gradients`).

Exits with status 1 if a run fails a statement at `FALSE_ALARM` for the whole run, or if something
is missing, recorded wrongly or other than what was computed again.
"""

import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.chaos.campaign import VICTIMS
from benchmarks.chaos.live_run import ChaosError, LiveRun, Setup
from benchmarks.harness import console, names_of, parser_of, report, table
from benchmarks.live_audit.audit import NotAuditableError, Report, audit
from benchmarks.live_audit.gradients import ALGORITHMS
from benchmarks.tiny_models import smoke_settings

_ROOT = Path(__file__).resolve().parent.parent.parent
_GAMES = _ROOT / "benchmarks/live_audit/games.py"
SECONDS = 1500.0
"""Longest wait for a start, some steps or an end."""

_COMMON = (
    "run.log_samples=jsonl",
    "run.log_sample_tokens=true",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=1000000",
    "evaluation.prompts=32",
    "evaluation.every=5",
    "monitoring.metrics=false",
    "task.train_size=64",
)
_AHEAD = "scheduler.max_runahead_groups=16"
_LEARNING = ("trainer.learning_rate=5.0e-4", _AHEAD)
"""Higher than the examples': versions that differ reject tokens."""
_WARM = ("sampling.temperature=1.3",)
_GUESSING = ("sampling.temperature=1.2", "task.evaluation_size=64", *_LEARNING)


@dataclass(frozen=True)
class Scenario:
    about: str
    config: str = "examples/arithmetic.yaml"
    settings: tuple[str, ...] = ()
    steps: int = 24
    """Optimizer steps of the quick audit."""
    kills: tuple[str, ...] = ()
    """Processes (`benchmarks.chaos.campaign`) that are killed, evenly over the run."""


def _game(about: str, game: str, *more: str, kills: tuple[str, ...] = ()) -> Scenario:
    """Guessing with hints that lie by chance."""
    name = (f"environment.name={_GAMES}:{game}", "environment.args={}")
    return Scenario(about, "examples/guessing.yaml", (*_GUESSING, *name, *more), kills=kills)


def _brittle(example: str, game: str, max_tokens: int) -> Scenario:
    """Environments fail at some turns, and few tokens cut some off; rewards are played again."""
    return Scenario(
        f"{example} with failures", f"examples/{example}.yaml",
        (f"environment.name={_GAMES}:{game}", "rewards.on_error=zero",
         "evaluation.max_unscored_share=0.9", "trainer.learning_rate=3.0e-3",
         f"sampling.max_tokens={max_tokens}", _AHEAD),
        steps=16,
    )  # fmt: skip


SCENARIOS = {
    "arithmetic": Scenario("one turn, learning fast", settings=(*_WARM, *_LEARNING)),
    "tails": Scenario(
        "lists of 3 tokens, top-k and top-p, at most 24 tokens, normalised advantages",
        settings=(
            *_LEARNING, "sampling.temperature=1.5", "engine.top_k_logprobs=3", "sampling.top_k=40",
            "sampling.top_p=0.98", "sampling.max_tokens=24", "trainer.weight_decay=0.1",
            "trainer.advantage_normalization=std", "trainer.loss_normalization=sequence",
        ),
    ),
    "ranks": Scenario("two ranks", settings=(*_WARM, *_LEARNING, "trainer.ranks=2"), steps=8),
    "guessing": Scenario("turns, replayed", "examples/guessing.yaml", _GUESSING),
    "recorded": _game("turns with hints that lie by chance, recorded", "Recorded"),
    "restoring": _game("the same, restored", "Restoring"),
    "starts over": _game("the same, starting over", "StartsOver"),
    "contexts": _game("each turn a conversation", "Conversations"),
    "failing guesses": _brittle("guessing", "BrittleGuessing", 26),
    "failing calculator": _brittle("calculator", "BrittleCalculator", 40),
    "failing restored": _brittle("guessing", "RestoredGuessing", 26),
    "failing starts over": _brittle("guessing", "PlainGuessing", 26),
    "killed": Scenario(
        "two generators; generators and a trainer are killed",
        settings=(*_WARM, *_LEARNING, "launcher.generators=2", "launcher.max_restarts=20"),
        kills=("generator", "generator", "trainer", "generator"),
    ),
    "resumed": Scenario(
        "the whole run is killed and resumed", settings=(*_WARM, *_LEARNING),
        kills=("controller", "controller"),
    ),
    "killed turns": _game(
        "turns; generators and the whole run are killed", "Recorded", "launcher.max_restarts=20",
        kills=("generator", "controller", "generator"),
    ),
} | {
    algorithm: Scenario(
        f"the gradients of {algorithm}", steps=8,
        settings=(
            *_WARM, *_LEARNING, f"trainer.algorithm={algorithm}",
            f"trainer.advantage_normalization={normalisation}",
        ),
    )
    for algorithm, normalisation in ALGORITHMS.items()
}  # fmt: skip
QUICK = ("arithmetic", "guessing", "failing guesses", "killed", "resumed")
SMOKE = ("evaluation.prompts=4", "evaluation.every=null")
SMOKE_RUN = "failing guesses"


def settings_of(name: str, engine: str, seed: int) -> tuple[str, ...]:
    own = SCENARIOS[name].settings
    return (*_COMMON, *own, f"engine.kind={engine}", f"run.seed={seed}")


def carry_out(
    name: str,
    folder: Path,
    *,
    engine: str = "torch",
    steps: int | None = None,
    seed: int = 0,
    settings: tuple[str, ...] = (),
) -> Path:
    """A run from its start to its end; its folder. Raises ChaosError."""
    scenario = SCENARIOS[name]
    steps = steps or scenario.steps
    setup = Setup(
        _ROOT / scenario.config,
        folder,
        (*settings_of(name, engine, seed), *settings),
        timeout_seconds=SECONDS,
    )
    run = LiveRun(setup, f"{name.replace(' ', '-')}-{engine}", steps)
    moments = random.Random(seed)
    try:
        run.start()
        for number, kind in enumerate(scenario.kills):
            after = steps * (number + 1) // (len(scenario.kills) + 1)
            run.until(lambda after=after: _trained(run) >= after, f"step {after}")  # type: ignore[misc]
            victim = VICTIMS[kind]
            run.until(lambda victim=victim: victim.is_possible(run), f"a {kind}")  # type: ignore[misc]
            victim.strike(run, moments)
            if victim.ends_the_run:
                run.start("--resume")
        if code := run.end(in_order=False):
            raise run.error(f"ended with exit code {code}")
    finally:
        run.abandon()
    return run.path


def _trained(run: LiveRun) -> int:
    try:
        return len(run.records())
    except OSError:
        return 0


def main(arguments: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    parser = parser_of(__doc__, f"the runs {', '.join(QUICK)}")
    parser.add_argument("--runs", help=f"some of: {'; '.join(SCENARIOS)} (separated by ;)")
    parser.add_argument("--engine", default="torch", choices=("torch", "vllm", "sglang"))
    parser.add_argument("--run", type=Path, help="audit a finished run that logged its tokens")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.runs = options.runs or SMOKE_RUN
        options.steps = options.steps or 3
    asked = options.runs or ";".join(QUICK if options.quick else SCENARIOS)
    names = names_of(parser, asked, SCENARIOS, ";")
    folder = options.keep or Path(mkdtemp(prefix="asyncrl-live-audit-"))
    folder.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        agent = "arithmetic" not in SCENARIOS[names[0]].config
        small = smoke_settings(folder, "agent" if agent else "arithmetic")
        options.settings = [*small, *SMOKE, *options.settings]
    try:
        if options.run:
            raw = {options.run.name: _audited(options.run)}
        else:
            raw = {name: _carried_out(name, folder, options) for name in names}
    except (NotAuditableError, ChaosError) as error:
        parser.error(str(error))
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    report(options, "live_audit", raw, {name: found["p_value"] for name, found in raw.items()})
    return 0 if all(found["fine"] for found in raw.values()) else 1


def _carried_out(name: str, folder: Path, options: Any) -> dict[str, Any]:
    began = time.perf_counter()
    run = carry_out(
        name, folder, engine=options.engine, steps=options.steps, seed=options.seed,
        settings=tuple(options.settings),
    )  # fmt: skip
    seconds = time.perf_counter() - began
    found = _audited(run)
    if not options.keep:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return found | {"run_seconds": seconds}


def _audited(run: Path) -> dict[str, Any]:
    began = time.perf_counter()
    found = audit(run)
    _print(found)
    return found.as_dict() | {"audit_seconds": time.perf_counter() - began}


def _print(found: Report) -> None:
    counts = ", ".join(f"{count:,} {name}" for name, count in found.counts.items())
    worst = sorted(found.statements, key=lambda one: one.p_value)[:6]
    again = ", ".join(f"{what} {gap:.1e}" for what, gap in found.gradients.items())
    shown = table(
        f"{found.run}: {found.samples:,} samples, {found.tokens:,} tokens ({counts}); "
        f"log-probabilities within {found.worst_logprob:.1e}; "
        f"{len(found.statements)} statements, p = {found.p_value:.2g} for all together; "
        f"computed again: {again or 'nothing'}",
        "statement,n,z,effect,p-value,verdict",
        (
            (
                one.name, f"{one.n:,}", one.z, one.effect, f"{one.p_value:.2g}",
                "WRONG" if one.p_value < found.limit else "ok",
            )
            for one in worst
        ),
    )  # fmt: skip
    screen = console()
    screen.print(shown, *(f"WRONG: {fault}" for fault in found.faults), sep="\n")
    screen.print("nothing is wrong" if found.is_fine else f"{len(found.failed)} statements fail")
