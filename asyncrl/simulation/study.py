"""Modes side by side in the simulator, and the map of where each is right."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.errors import UserError
from asyncrl.simulation.cost import DEVICES, MODELS, Cost, Costs, roofline
from asyncrl.simulation.fit import WARM_UP, Fit
from asyncrl.simulation.lengths import Lengths, Rule, Survival, empirical, lognormal
from asyncrl.simulation.world import Outcome, Setting, World
from scheduler.config import SchedulerConfig

MODES: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "sync": ({"on_update": "keep", "max_off_policy_steps": 0}, 0.0),
    "keep(1)": ({"on_update": "keep", "max_off_policy_steps": 1}, 0.0),
    "keep(4)": ({"on_update": "keep", "max_off_policy_steps": 4}, 0.0),
    "recompute(1)": ({"on_update": "recompute", "max_off_policy_steps": 1}, 0.0),
    "verify, 1 ahead": ({"on_update": "verify", "max_off_policy_steps": 0}, 1.0),
    "verify": ({"on_update": "verify", "max_off_policy_steps": 0}, 2.0),
    "verify, 3 ahead": ({"on_update": "verify", "max_off_policy_steps": 0}, 3.0),
    "verify, k=1": ({"on_update": "verify", "max_off_policy_steps": 1}, 2.0),
    "verify, k=2": ({"on_update": "verify", "max_off_policy_steps": 2}, 2.0),
}
"""Name to settings of the scheduler, and how many whole steps run-ahead may cover. `verify` is the
default of a run."""

BALANCE = 0.9
"""A trainer whose size is not given is made so large that it would be busy for this share of the
time if generators were never idle."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated."""

    model: str = "7b"
    device: str = "h200"
    generators: int = 256
    slots: int = 64
    """Rows that a generator decodes at once."""
    steps: int = 12
    warm_up: int = 4
    """Steps that are left out of the sums; a quarter of the steps at least makes sense."""
    median: float = 1000.0
    """Tokens of an answer, log-normal."""
    sigma: float = 1.0
    longest: int = 16384
    drift: float = 3e-4
    """Total variation per token and optimizer step."""
    rule: Rule = "token"
    """How verification judges: the worst case, or as it really does; see `lengths.Survival`."""
    redraft: float = 0.7
    """Chance that a token of the old continuation is accepted as a draft of what is written again;
    0: it is not drafted from. Other drafting is left out, in every mode."""
    groups_per_step: int | None = None
    """None: as many as fill every slot once."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The bounds that no mode sets, group_size among them."""
    prompt_tokens: int = 200
    trainer_devices: float | None = None
    """None: so many that generation and training would cost the same, see `BALANCE`."""
    fit: Fit | None = None
    """Costs and lengths of a real run, in place of the roofline and the log-normal."""
    seed: int = 0

    @property
    def step_groups(self) -> int:
        """Groups of an optimizer step."""
        samples = self.generators * self.slots
        return self.groups_per_step or max(1, samples // self.scheduler.group_size)

    def lengths(self) -> Lengths:
        """The answers."""
        if self.fit is not None:
            return empirical(self.fit.lengths)
        return lognormal(self.median, self.sigma, self.longest)

    def cost(self) -> Costs:
        """Seconds of things. Raises UserError when there is no such model or device."""
        return self.roofline()[0] if self.fit is None else self.fit.cost

    def roofline(self) -> tuple[Cost, float]:
        """Seconds of things by bytes and operations, and the trainer's devices.

        Raises:
            UserError: there is no such model or device.
        """
        for name, known in ((self.model, MODELS), (self.device, DEVICES)):
            if name not in known:
                raise UserError(f"the simulator knows no {name!r}; there are {', '.join(known)}")
        model, device = MODELS[self.model], DEVICES[self.device]
        devices = self.trainer_devices
        if devices is None:
            one = roofline(model, device, trainer_devices=1)
            rng, draw = random.Random(0), self.lengths()  # noqa: S311 - a simulation
            mean = sum(draw(rng) for _ in range(4000)) / 4000
            step = one.decode(self.slots, self.slots * (self.prompt_tokens + mean / 2))
            rate = self.generators * self.slots / step
            devices = rate * one.train_token_seconds * (1 + self.prompt_tokens / mean) / BALANCE
        return roofline(model, device, trainer_devices=devices), devices

    def simulate(self, mode: str) -> Outcome:
        """One mode. Raises UserError when there is no such mode."""
        if mode not in MODES:
            raise UserError(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
        settings, ahead = MODES[mode]
        runahead = max(1, round(ahead * self.step_groups)) if ahead else None
        return self.run(replaced(self.scheduler, **settings, max_runahead_groups=runahead))

    def configured(self) -> Outcome:
        """As the configuration's own section `scheduler` says."""
        return self.run(self.scheduler)

    def run(self, scheduler: SchedulerConfig) -> Outcome:
        """With these bounds."""
        config = replaced(scheduler, groups_per_step=self.step_groups)
        setting = Setting(
            config, self.generators, self.slots, self.steps, self.cost(), self.lengths(),
            prompt_tokens=self.prompt_tokens, drift=self.drift, redraft=self.redraft,
            survival=Survival(self.rule), seed=self.seed,
        )  # fmt: skip
        return World(setting).run(self.warm_up)

    def title(self) -> str:
        """What is simulated, in words."""
        drift = f"total variation {self.drift:.2g} per token and step, kept by {self.rule}"
        groups = f"{self.step_groups} groups of {self.scheduler.group_size} a step"
        if self.fit is not None:
            return (
                f"simulated: {self.generators} generators of {self.slots} rows, {groups}, costs "
                f"and lengths of the run {self.fit.name}, {drift}"
            )
        return (
            f"simulated: {self.generators} generators ({self.device}, {self.model}, "
            f"{self.slots} rows each), a trainer of {self.roofline()[1]:.0f} devices, {groups}, "
            f"answers of {self.median:.0f} tokens (median) up to {self.longest}, {drift}"
        )


def cluster(config: RunConfig | None, fit: Fit | None, **changes: Any) -> Cluster:
    """The machine and the task of a run.

    Args:
        config: sizes and the scheduler's bounds; None: those of `fit`, or the defaults.
        fit: costs and lengths of a real run; None: the roofline and a log-normal.
        changes: go before what these say.
    """
    fields: dict[str, Any] = {}
    if fit is not None:
        config = config or fit.config
        fields |= {
            "fit": fit,
            "steps": max(fit.steps, WARM_UP + 9),
            "warm_up": WARM_UP,
            "prompt_tokens": 0,  # reading prompts is in the cost of the run's steps
            "rule": "block",
        }
        if fit.drift is not None:
            fields["drift"] = fit.drift
    if config is not None:
        longest = config.sampling.max_tokens
        fields |= {
            "generators": config.launcher.generators,
            "slots": config.engine.slots,
            "longest": longest,
            "median": min(1000.0, longest / 4),
            "groups_per_step": config.scheduler.groups_per_step,
            "scheduler": config.scheduler,
        }
    return Cluster(**fields | changes)


def replaced(scheduler: SchedulerConfig, **changes: Any) -> SchedulerConfig:
    """A checked copy; run-ahead and what else one `on_update` alone has is left out for others."""
    fields = scheduler.model_dump() | changes
    if fields["on_update"] != "verify":
        fields["max_runahead_groups"] = None
    if fields["on_update"] == "recompute":
        fields["partial_rollout"] = True
    return SchedulerConfig(**fields)


def compare(cluster: Cluster, modes: Iterable[str]) -> dict[str, Outcome]:
    """Each mode on the same cluster."""
    return {mode: cluster.simulate(mode) for mode in modes}


@dataclass(frozen=True, slots=True)
class Place:
    """One place of the regime map."""

    median: float
    drift: float
    outcomes: dict[str, Outcome]


REGIME_MODES = ("sync", "verify", "verify, k=1", "verify, k=2", "keep(4)")


def regime(
    cluster: Cluster,
    *,
    medians: Sequence[float] = (1000, 4000, 16000, 32000),
    drifts: Sequence[float] = (1e-4, 3e-4, 1e-3, 1e-2),
    modes: Sequence[str] = REGIME_MODES,
) -> list[Place]:
    """Every mode over answer length and drift; `longest` is four times the median."""
    places = []
    for median in medians:
        for drift in drifts:
            here = replace(
                cluster, median=median, longest=round(4 * median), sigma=0.7, drift=drift
            )
            places.append(Place(median, drift, compare(here, modes)))
    return places


NEAR = 0.85
"""Of the speed of the fastest bound on staleness, what a stricter one must reach to be right."""


def right_choice(place: Place) -> str:
    """The strictest of `verify` with k = 0, 1, 2 that is nearly as fast as the fastest of them."""
    modes = [mode for mode in ("verify", "verify, k=1", "verify, k=2") if mode in place.outcomes]
    fastest = min(place.outcomes[mode].step_seconds for mode in modes)
    return next(m for m in modes if place.outcomes[m].step_seconds * NEAR <= fastest)


def as_json(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Plain values."""
    return {mode: asdict(outcome) for mode, outcome in outcomes.items()}
