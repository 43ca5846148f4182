"""The modes on devices of their own: real runs at the pace of modelled devices.

    python -m benchmarks.paced [--quick] [--json FILE]

Each run is `asyncrl run benchmarks/paced/paced.yaml` with the real parts, with the torch engine on
a tiny model and the learner. After each engine step and each group's gradient the process sleeps
until the time is over that a roofline (`asyncrl.simulation.cost`) gives for an H200 and a 7B model,
so they overlap as on devices of their own (`benchmarks.paced.pace`). Lengths are
heavy-tailed and divided by 64; training costs as much as generation. The statistic is the ratio of
step times. Each run is simulated with the same lengths, costs and scheduler; the largest deviation
of the step times is `sim_vs_paced`.

--quick: every mode with one generator, sync, keep(4) and verify with two and four. In full also
other costs of training, an H100 with 1.5B, half the scale, and no dilation; about 40 minutes.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from asyncrl.config.run_config import load_config
from asyncrl.rollout.trajectory import SampleId
from asyncrl.simulation.lengths import Survival
from asyncrl.simulation.outcome import Outcome
from asyncrl.simulation.setting import Setting
from asyncrl.simulation.world import World
from benchmarks.harness import names_of, parser_of, pick, report
from benchmarks.paced.findings import Findings, Result, label, tables
from benchmarks.paced.model import make_model
from benchmarks.paced.run import Numbers, RunError, carry_out
from benchmarks.paced.setting import (
    CONFIG,
    MODES,
    PROMPT_TOKENS,
    VERIFY,
    Paced,
    full,
    quick,
    smoke,
)

REDRAFT = 0.735
"""Acceptance of a rejected continuation as a draft: the sum of squares of `model.LETTERS`."""
_SEEDS = 3
_BISECTIONS = 7
_MAX_DRIFT = 0.03


def simulate(paced: Paced, numbers: Numbers) -> Outcome:
    """Simulate a paced run.

    Each answer has the length that it had there. Steps are longer by what the host took between
    two of them.
    """
    setting = replace(_setting(paced, numbers), drift=fitted_drift(paced, numbers))
    return _repeated(setting, paced)


def fitted_drift(paced: Paced, numbers: Numbers) -> float:
    """The drift at which the simulator rejects as many tokens as the run; nothing else is fitted.

    Total variation per token and optimizer step, 0 if the run rejected nothing.
    """
    if paced.mode != VERIFY or not numbers.regenerated:
        return 0.0
    setting = _setting(paced, numbers)
    low, high = 0.0, _MAX_DRIFT
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = _repeated(replace(setting, drift=middle), paced)
        if found.regenerated < numbers.regenerated:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _setting(paced: Paced, numbers: Numbers | None) -> Setting:
    config = load_config(CONFIG, paced.settings(CONFIG, CONFIG.parent)).scheduler
    known = {} if numbers is None else numbers.lengths
    cost = paced.cost()
    if numbers is not None:
        cost = replace(cost, step_seconds=cost.step_seconds + numbers.between_steps)
    return Setting(
        config,
        paced.generators,
        paced.slots,
        paced.steps,
        cost,
        paced.lengths.draw,
        again=_lengths_by_step(known, paced.groups_per_step) if known else None,
        known={SampleId(*sample): length for sample, length in known.items()},
        prompt_tokens=PROMPT_TOKENS,
        redraft=REDRAFT,
        new_length=1.0,  # letters are drawn independently: where a response ends, too
        survival=Survival("block"),
    )


def _lengths_by_step(
    known: Mapping[tuple[int, int], int], groups_per_step: int
) -> Callable[[SampleId, random.Random], int]:
    """Draw a rejected sample's new length from those of its step: they change as the policy learns.

    In 16 steps the mean falls from 30 to 15 tokens, and the longest from 250 to 130.
    """
    by_step: dict[int, list[int]] = {}
    for (group, _), length in known.items():
        by_step.setdefault(group // groups_per_step, []).append(length)
    return lambda sample, rng: rng.choice(by_step[sample.group // groups_per_step])


def _repeated(setting: Setting, paced: Paced) -> Outcome:
    outcomes = [World(replace(setting, seed=seed)).run(*paced.window) for seed in range(_SEEDS)]
    numbers = {
        one.name: sum(getattr(outcome, one.name) for outcome in outcomes) / _SEEDS
        for one in fields(Outcome)
        if one.name not in ("told", "commanded", "run_ahead")
    }
    return Outcome(**numbers)  # type: ignore[arg-type]


def measure(runs: Sequence[Paced], folder: Path) -> Findings:
    """All runs. One that fails is recorded, and the others continue."""
    findings = Findings()
    for paced in runs:
        model = folder / f"model-{paced.scale.lengths:g}"
        if not model.exists():
            make_model(model, paced.lengths)
        try:
            numbers = carry_out(paced, model, folder)
        except RunError as error:
            findings.failed[paced.name] = str(error).splitlines()[0]
            print(error)
            continue
        result = Result(paced, numbers, simulate(paced, numbers))
        findings.results.append(result)
        print(
            f"{label(paced)}, {paced.mode}: {numbers.step_seconds:.3f} s / step, simulated "
            f"{result.simulated.step_seconds:.3f} ({result.deviation:+.1%})",
            flush=True,
        )
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    planned = pick(options, full, quick, smoke)()
    runs = [one for one in planned if _chosen(one, options)]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.keep or made).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        findings = measure(runs, folder)
    report(options, "paced", findings.raw(), findings.ratios(), *tables(findings))
    return 1 if findings.failed else 0


def _chosen(paced: Paced, options: argparse.Namespace) -> bool:
    return paced.mode in options.modes and paced.generators in options.generators


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "fewer settings, fewer steps")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs in this new folder")
    parser.add_argument("--modes", metavar="A,B", default=",".join(MODES), help="only these modes")
    parser.add_argument(
        "--generators", metavar="N,M", default="1,2,4", help="only these numbers of generators"
    )
    options = parser.parse_args(arguments)
    options.modes = names_of(parser, options.modes, MODES)
    options.generators = [int(number) for number in options.generators.split(",")]
    return options
