"""The same runs in the simulator: same scheduler, same costs, the lengths of the paced run."""

from __future__ import annotations

import math
from dataclasses import replace

from asyncrl.config.run_config import load_config
from asyncrl.rollout.trajectory import SampleId
from asyncrl.simulation.lengths import Survival
from asyncrl.simulation.outcome import mean
from asyncrl.simulation.world import Outcome, Setting, World
from benchmarks.paced.pace import Scale
from benchmarks.paced.run import Numbers
from benchmarks.paced.setting import CONFIG, MODES, PROMPT_TOKENS, VERIFY, Machine, Paced

REDRAFT = 0.735
"""Acceptance of a rejected continuation as a draft: the sum of squares of `model.LETTERS`."""
_SEEDS = 3
_BISECTIONS = 7
_MAX_DRIFT = 0.03
_LARGE_STEPS = 12


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


def simulate_device(generators: int, drift: float, machine: Machine) -> dict[str, Outcome]:
    """Simulate all modes with whole answers, on whole generators of the device."""
    scaled = Paced()
    whole = replace(
        scaled,
        generators=generators,
        machine=machine,
        scale=Scale(1.0, 1.0, 1.0),
        slots=round(scaled.slots * scaled.scale.rows),
        steps=_LARGE_STEPS,
    )
    prompt = PROMPT_TOKENS * scaled.scale.lengths
    found = {}
    for mode in MODES:
        setting = replace(
            _setting(replace(whole, mode=mode), None),
            cost=whole.cost(prompt),
            prompt_tokens=prompt,
            drift=drift / math.sqrt(scaled.scale.lengths),
        )
        found[mode] = World(setting).run(*whole.window)
    return found


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
        known={SampleId(*sample): length for sample, length in known.items()},
        prompt_tokens=PROMPT_TOKENS,
        redraft=REDRAFT,
        new_length=1.0,  # letters are drawn independently: where a response ends, too
        survival=Survival("block"),
    )


def _repeated(setting: Setting, paced: Paced) -> Outcome:
    outcomes = [World(replace(setting, seed=seed)).run(*paced.window) for seed in range(_SEEDS)]
    return mean(outcomes)
