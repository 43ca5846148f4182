"""Whether real runs train on draws of the policies that they say.

    python -m benchmarks.live_audit [--quick] [--runs "arithmetic;guessing"] [--engine torch]
                                    [--steps N] [--seed S] [--set KEY=VALUE] [--json FILE]
    python -m benchmarks.live_audit --mutants [NAMES] [--json FILE]
    python -m benchmarks.live_audit --run runs/NAME

Each run is `asyncrl run` in processes of its own: run-ahead, drafts from the cache, verification,
partial rollouts, environments, evaluations, and what is killed. Then the distribution of every
trained token is computed again from the checkpoint of its version with plain transformers, and
everything that must have mean 0 is summed (`statements`), samples are tested for independence
(`independence`) and groups are compared with plain sampling (`reference`).

Exits with status 1 if a right run fails a statement at `FALSE_ALARM` for the whole run, if
something is missing or recorded wrongly, or if a mutant is not detected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.chaos.campaign import VICTIMS
from benchmarks.chaos.live_run import ChaosError, LiveRun, Setup
from benchmarks.harness import console, environment, names_of, parser_of, report, table
from benchmarks.live_audit.audit import (
    Material,
    NotAuditableError,
    Report,
    audit,
    forget_versions,
    judge,
    read,
)
from benchmarks.live_audit.tokens import Integers
from benchmarks.tiny_models import smoke_settings

_ROOT = Path(__file__).resolve().parent.parent.parent
_GAMES = _ROOT / "benchmarks/live_audit/games.py"
_INJECTED = Path(__file__).resolve().parent / "injected"
MUTANT = "ASYNCRL_AUDIT_MUTANT"
"""Environment variable: what is to be wrong in the run's processes (`injected.sitecustomize`)."""
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
_LEARNING = ("trainer.learning_rate=5.0e-4",)
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


SCENARIOS = {
    "arithmetic": Scenario("one turn, learning fast", settings=(*_WARM, *_LEARNING)),
    "fixed": Scenario(
        "one turn, a policy that stays as it is, all samples of it compared with plain sampling",
        settings=(*_WARM, "trainer.learning_rate=1.0e-30"),
    ),
    "tails": Scenario(
        "lists of 3 tokens, top-k and top-p, at most 24 tokens",
        settings=(
            *_LEARNING, "sampling.temperature=1.5", "engine.top_k_logprobs=3", "sampling.top_k=40",
            "sampling.top_p=0.98", "sampling.max_tokens=24",
        ),
    ),
    "guessing": Scenario("turns, replayed", "examples/guessing.yaml", _GUESSING),
    "recorded": Scenario(
        "turns with hints that lie by chance, recorded", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:Recorded", "environment.args={}"),
    ),
    "restoring": Scenario(
        "the same, restored", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:Restoring", "environment.args={}"),
    ),
    "starts over": Scenario(
        "the same, starting over", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:StartsOver", "environment.args={}"),
    ),
    "contexts": Scenario(
        "each turn a conversation", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:Conversations", "environment.args={}"),
    ),
    "killed": Scenario(
        "two generators; generators and a trainer are killed",
        settings=(*_WARM, *_LEARNING, "launcher.generators=2", "launcher.max_restarts=20"),
        kills=("generator", "generator", "trainer", "generator"),
    ),
    "resumed": Scenario(
        "the whole run is killed and resumed", settings=(*_WARM, *_LEARNING),
        kills=("controller", "controller"),
    ),
    "killed turns": Scenario(
        "turns; generators and the whole run are killed", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:Recorded", "environment.args={}",
         "launcher.max_restarts=20"),
        kills=("generator", "controller", "generator"),
    ),
}  # fmt: skip


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
    mutant: str | None = None,
) -> Path:
    """A run from its start to its end; its folder. Raises ChaosError."""
    scenario = SCENARIOS[name]
    if mutant is not None:
        settings += ("run.on_wrong_policy=warn",)  # a run finds some of them itself, and ends
    steps = steps or scenario.steps
    setup = Setup(
        _ROOT / scenario.config,
        folder,
        (*settings_of(name, engine, seed), *settings),
        timeout_seconds=SECONDS,
    )
    run = LiveRun(setup, f"{name.replace(' ', '-')}-{engine}-{mutant or 'right'}", steps)
    moments = random.Random(seed)
    with _injected(mutant):
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


def _injected(mutant: str | None) -> contextlib.AbstractContextManager[None]:
    """Have the processes that are started meanwhile load `injected/sitecustomize.py`."""
    if mutant is None:
        return contextlib.nullcontext()
    path = f"{_INJECTED}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return environment(**{"PYTHONPATH": path, MUTANT: mutant})


Spoil = Callable[[Material, np.random.Generator], Integers]
"""Indices of the records that are left."""


def drop_long(one: Material, rng: np.random.Generator) -> Integers:
    """Half of the longest tenth is not trained on."""
    lengths = np.array([record.response_length for record in one.records])
    long = lengths >= np.quantile(lengths, 0.9)
    return np.flatnonzero(~(long & (rng.random(len(lengths)) < 0.5)))


def drop_wrong(one: Material, rng: np.random.Generator) -> Integers:
    """A third of the samples with the lowest reward is not trained on."""
    rewards = np.array([record.reward for record in one.records])
    return np.flatnonzero(~((rewards <= rewards.min()) & (rng.random(len(rewards)) < 1 / 3)))


def short_first(one: Material, rng: np.random.Generator) -> Integers:
    """Of each group the longest sample is left out: the others are trained on as they end."""
    del rng
    longest: dict[int, int] = {}
    for i, record in enumerate(one.records):
        best = longest.setdefault(record.group, i)
        if record.response_length > one.records[best].response_length:
            longest[record.group] = i
    return np.array(sorted(set(range(len(one.records))) - set(longest.values())), np.int64)


SPOILS: dict[str, Spoil] = {
    "half of the longest tenth dropped": drop_long,
    "a third of the wrong ones dropped": drop_wrong,
    "the longest of each group dropped": short_first,
}


def spoiled(one: Material, name: str, seed: int) -> Material:
    """The same run with these records left."""
    left = SPOILS[name](one, np.random.default_rng(seed))
    number = np.full(len(one.records), -1, np.int64)
    number[left] = np.arange(len(left))
    tokens = one.tokens.where(number[one.tokens.sample] >= 0)
    tokens = dataclasses.replace(tokens, sample=number[tokens.sample])
    return dataclasses.replace(one, records=[one.records[i] for i in left], tokens=tokens)


QUICK = ("arithmetic", "fixed", "guessing", "killed", "resumed")
SMOKE = ("evaluation.prompts=4", "evaluation.every=null")
MUTATED = {
    "accept-too-often": "arithmetic",
    "accept-all": "arithmetic",
    "drafts-too-often": "arithmetic",
    "shared-seeds": "arithmetic",
    "unlikely-ones-again": "fixed",
}
"""Wrong runs: the mutant, and the scenario that it spoils."""
RECORDS = "records"
"""In their place: a right run, whose records are spoiled in several ways (`spoils`)."""


def main(arguments: Sequence[str] | None = None) -> int:

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    parser = parser_of(__doc__, f"the runs {', '.join(QUICK)}")
    parser.add_argument("--runs", help=f"some of: {'; '.join(SCENARIOS)} (separated by ;)")
    parser.add_argument("--engine", default="torch", choices=("torch", "vllm", "sglang"))
    parser.add_argument(
        "--mutants", nargs="?", const=";".join((*MUTATED, RECORDS)), metavar="NAMES",
        help=f"wrong runs, which must be found: {'; '.join((*MUTATED, RECORDS))}",
    )  # fmt: skip
    parser.add_argument("--run", type=Path, help="audit a finished run that logged its tokens")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.runs = options.runs or QUICK[0]
        options.steps = options.steps or 3
    asked = options.runs or ";".join(QUICK if options.quick else SCENARIOS)
    names = names_of(parser, asked, SCENARIOS, ";")
    if options.mutants:
        names_of(parser, options.mutants, (*MUTATED, RECORDS), ";")
    folder = options.keep or Path(mkdtemp(prefix="asyncrl-live-audit-"))
    folder.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        options.settings = [*smoke_settings(folder), *SMOKE, *options.settings]
    try:
        if options.run:
            raw = {options.run.name: _audited(options.run)}
        elif options.mutants:
            raw = _mutants(folder, options)
        else:
            raw = {name: _carried_out(name, folder, options) for name in names}
    except (NotAuditableError, ChaosError) as error:
        parser.error(str(error))
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    least = {name: found["p_value"] for name, found in raw.items()}
    report(options, "live_audit", raw, least)
    return 0 if all(found["as it should be"] for found in raw.values()) else 1


def _carried_out(
    name: str, folder: Path, options: Any, mutant: str | None = None
) -> dict[str, Any]:
    began = time.perf_counter()
    run = carry_out(
        name, folder, engine=options.engine, steps=options.steps, seed=options.seed,
        settings=tuple(options.settings), mutant=mutant,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    found = _audited(run, is_right=mutant is None)
    forget_versions(run)
    return found | {"run_seconds": seconds}


def _audited(run: Path, *, is_right: bool = True) -> dict[str, Any]:
    began = time.perf_counter()
    found = audit(run)
    _print(found, is_right=is_right)
    seconds = time.perf_counter() - began
    fine = found.is_fine == is_right
    return found.as_dict() | {"as it should be": fine, "audit_seconds": seconds}


def _mutants(folder: Path, options: Any) -> dict[str, Any]:
    """Wrong runs, and a right run whose records are spoiled."""
    found: dict[str, Any] = {}
    for mutant in options.mutants.split(";"):
        if mutant == RECORDS:
            found |= _spoils(folder, options)
        else:
            found[mutant] = _carried_out(MUTATED[mutant], folder, options, mutant)
    return found


def _spoils(folder: Path, options: Any) -> dict[str, Any]:
    run = carry_out("fixed", folder, steps=options.steps, seed=options.seed)
    found = {}
    with TemporaryDirectory(prefix="asyncrl-audit-") as scratch:
        material = read(run, Path(scratch))
        for name in SPOILS:
            one = judge(spoiled(material, name, options.seed))
            _print(one, is_right=False, about=name)
            # What is missing is found without any chance; `p_value` says what the sums see of it.
            found[name] = one.as_dict() | {"as it should be": not one.is_fine}
    return found


def _print(found: Report, *, is_right: bool, about: str = "") -> None:
    counts = ", ".join(f"{count:,} {name}" for name, count in found.counts.items())
    worst = sorted(found.statements, key=lambda one: one.p_value)[:6]
    shown = table(
        f"{about or found.run}: {found.samples:,} samples, {found.tokens:,} tokens ({counts}); "
        f"log-probabilities within {found.worst_logprob:.1e}; "
        f"{len(found.statements)} statements, p = {found.p_value:.2g} for all together",
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
    verdict = "nothing is wrong" if found.is_fine else f"{len(found.failed)} statements fail"
    screen.print(verdict + ("" if is_right else " (this run is wrong on purpose)"))
