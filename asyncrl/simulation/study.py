"""Modes side by side in the simulator, and the map of where each is right."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from asyncrl.errors import UserError
from asyncrl.simulation.cost import DEVICES, MODELS, Cost, roofline
from asyncrl.simulation.lengths import Lengths, lognormal
from asyncrl.simulation.world import Outcome, Setting, World
from scheduler.config import SchedulerConfig

MODES: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "sync": ({"on_update": "keep", "max_off_policy_steps": 0}, 0.0),
    "keep(1)": ({"on_update": "keep", "max_off_policy_steps": 1}, 0.0),
    "keep(4)": ({"on_update": "keep", "max_off_policy_steps": 4}, 0.0),
    "verify": ({"on_update": "verify", "max_off_policy_steps": 0}, 1.0),
    "verify, 3 ahead": ({"on_update": "verify", "max_off_policy_steps": 0}, 3.0),
    "verify, k=1": ({"on_update": "verify", "max_off_policy_steps": 1}, 1.0),
    "verify, k=1, 3 ahead": ({"on_update": "verify", "max_off_policy_steps": 1}, 3.0),
}
"""Name to settings of the scheduler, and how many whole steps run-ahead may cover."""

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
    steps: int = 8
    warm_up: int = 3
    """Steps that are left out of the sums."""
    median: float = 1000.0
    """Tokens of an answer, log-normal."""
    sigma: float = 1.0
    longest: int = 16384
    drift: float = 3e-4
    """Total variation per token and optimizer step."""
    redraft: float = 0.7
    """Chance that a token of the old continuation is accepted as a draft of what is written again;
    0: it is not drafted from. Other drafting is left out, in every mode."""
    group_size: int = 8
    groups_per_step: int | None = None
    """None: as many as fill every slot once."""
    prompt_tokens: int = 200
    trainer_devices: float | None = None
    """None: so many that generation and training would cost the same, see `BALANCE`."""
    seed: int = 0

    @property
    def step_groups(self) -> int:
        """Groups of an optimizer step."""
        return self.groups_per_step or max(1, self.generators * self.slots // self.group_size)

    def lengths(self) -> Lengths:
        """The answers."""
        return lognormal(self.median, self.sigma, self.longest)

    def cost(self) -> tuple[Cost, float]:
        """Seconds of things, and the trainer's devices.

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
        config = SchedulerConfig(
            group_size=self.group_size,
            groups_per_step=self.step_groups,
            max_runahead_groups=max(1, round(ahead * self.step_groups)) if ahead else None,
            **settings,
        )
        cost, _ = self.cost()
        setting = Setting(
            config, self.generators, self.slots, self.steps, cost, self.lengths(),
            prompt_tokens=self.prompt_tokens, drift=self.drift,
            redraft=self.redraft, seed=self.seed,
        )  # fmt: skip
        return World(setting).run(self.warm_up)


def compare(cluster: Cluster, modes: Iterable[str]) -> dict[str, Outcome]:
    """Each mode on the same cluster."""
    return {mode: cluster.simulate(mode) for mode in modes}


def table(cluster: Cluster, outcomes: Mapping[str, Outcome]) -> Table:
    """For people; speed is relative to the first mode."""
    _, devices = cluster.cost()
    title = (
        f"simulated: {cluster.generators} generators ({cluster.device}, {cluster.model}, "
        f"{cluster.slots} rows each), a trainer of {devices:.0f} devices, {cluster.step_groups} "
        f"groups of {cluster.group_size} a step, answers of {cluster.median:.0f} tokens (median) "
        f"up to {cluster.longest}, total variation {cluster.drift:g} per token and step"
    )
    out = Table(
        title=title,
        caption="again: tokens that verification rejected, over tokens trained on",
    )
    columns = "mode,s/step,speed,tokens/s,gen. idle,train idle,staleness,again"
    for column in columns.split(","):
        out.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    first = next(iter(outcomes.values())).step_seconds
    for mode, outcome in outcomes.items():
        out.add_row(
            mode,
            f"{outcome.step_seconds:.1f}",
            f"{first / outcome.step_seconds:.2f}x",
            f"{outcome.tokens_per_second:,.0f}",
            f"{outcome.generator_idle:.0%}",
            f"{outcome.trainer_idle:.0%}",
            f"{outcome.staleness_mean:.2f}, max {outcome.staleness_max}",
            f"{outcome.regenerated:.0%}",
        )
    return out


@dataclass(frozen=True, slots=True)
class Place:
    """One place of the regime map."""

    median: float
    drift: float
    outcomes: dict[str, Outcome]


def regime(
    cluster: Cluster,
    *,
    medians: Sequence[float] = (1000, 4000, 16000, 32000),
    drifts: Sequence[float] = (1e-4, 3e-4, 1e-3, 1e-2),
    modes: Sequence[str] = ("sync", "verify", "verify, k=1", "verify, k=1, 3 ahead", "keep(4)"),
) -> list[Place]:
    """Every mode over answer length and drift; `longest` is four times the median."""
    places = []
    for median in medians:
        for drift in drifts:
            fields = asdict(cluster) | {
                "median": median,
                "longest": round(4 * median),
                "sigma": 0.7,
                "drift": drift,
            }
            places.append(Place(median, drift, compare(Cluster(**fields), modes)))
    return places


def regime_table(places: Sequence[Place]) -> Table:
    """Speed over `sync`, and what is written again, for each mode."""
    out = Table(title="speed over sync / share written again, by median length and drift")
    out.add_column("median", justify="right")
    out.add_column("TV", justify="right")
    modes = [mode for mode in places[0].outcomes if mode != "sync"]
    for mode in modes:
        out.add_column(mode, justify="right")
    out.add_column("best on-policy", justify="left")
    for place in places:
        sync = place.outcomes["sync"].step_seconds
        cells = [
            f"{sync / place.outcomes[mode].step_seconds:.2f}x / "
            f"{place.outcomes[mode].regenerated:.0%}"
            for mode in modes
        ]
        strict = {m: o.step_seconds for m, o in place.outcomes.items() if o.staleness_max == 0}
        best = min(strict, key=lambda mode: strict[mode])
        out.add_row(f"{place.median:.0f}", f"{place.drift:g}", *cells, best)
    return out
