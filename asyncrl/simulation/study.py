"""Compares modes in the simulator, and maps where each one is right."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from functools import partial
from typing import Any, TypeVar

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.scheduler.config import DynamicSamplingConfig, SchedulerConfig
from asyncrl.simulation.cost import DEVICES, MODELS, Cost, Costs, kv_tokens, roofline
from asyncrl.simulation.failures import Failures, Stragglers
from asyncrl.simulation.fit import WARM_UP, Fit
from asyncrl.simulation.lengths import Lengths, Rule, Survival, empirical, lognormal
from asyncrl.simulation.network import Network
from asyncrl.simulation.outcome import Outcome
from asyncrl.simulation.setting import Conditions, Setting
from asyncrl.simulation.world import World

MODES: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "sync": ({"on_update": "keep", "max_off_policy_steps": 0}, 0.0),
    "keep(1)": ({"on_update": "keep", "max_off_policy_steps": 1}, 0.0),
    "keep(4)": ({"on_update": "keep", "max_off_policy_steps": 4}, 0.0),
    "recompute(1)": ({"on_update": "recompute", "max_off_policy_steps": 1}, 0.0),
    "verify, 1 ahead": ({"on_update": "verify", "max_off_policy_steps": 0}, 1.0),
    "verify": ({"on_update": "verify", "max_off_policy_steps": 0}, 2.0),
    "verify, auto": ({"on_update": "verify", "max_off_policy_steps": 0}, 0.0),
    "verify, 3 ahead": ({"on_update": "verify", "max_off_policy_steps": 0}, 3.0),
    "verify, k=1": ({"on_update": "verify", "max_off_policy_steps": 1}, 2.0),
    "verify, k=2": ({"on_update": "verify", "max_off_policy_steps": 2}, 2.0),
}
"""Scheduler settings by mode, and the whole steps that run-ahead may cover. Default: `verify`."""

T = TypeVar("T")
REGIME_MODES = ("sync", "verify", "verify, k=1", "verify, k=2", "keep(4)")
SESSIONS = 4
"""Default number of a generator's open environments, as a multiple of its slots."""
BALANCE = 0.9
"""Share of the time that the trainer is busy if generators never idle; determines its size."""
NEAR = 0.85
"""Share of the fastest staleness bound's speed that a stricter bound must reach."""


@dataclass(frozen=True, slots=True)
class Cluster(Conditions):
    """The simulated cluster: a machine, a model and its answers."""

    model: str = "7b"
    device: str = "h200"
    generators: int = 32
    slots: int = 64
    """Rows that a generator decodes at once."""
    steps: int = 12
    warm_up: int = 4
    """First steps, which the results leave out; use at least a quarter of the steps."""
    cool_down: int = 0
    """Last steps, which the results leave out; run-ahead has less to do in the last few."""
    median: float = 1000.0
    """Median tokens of an answer; lengths are log-normal."""
    sigma: float = 1.0
    longest: int = 16384
    rule: Rule = "token"
    """Model of verification: `token` (the worst case) or `block`; see `lengths.Survival`."""
    outside: float = 0.0
    noise: float = 0.0
    """Total variation per token of engines under unchanged weights."""
    signal_share: float | None = None
    """Share of groups with signal, with dynamic sampling in all modes; None: as in `scheduler`."""
    groups_per_step: int | None = None
    """None: as many as fill every slot once."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Bounds and sizes that the modes do not set, such as group_size."""
    trainer_devices: float | None = None
    """None: enough to balance training with generation, see `BALANCE`."""
    gpus_per_generator: int = 1
    """GPUs of each generator, which share its weights and its work (tensor parallel)."""
    fit: Fit | None = None
    """Costs and lengths of a real run, instead of the roofline and the log-normal."""
    sessions: int | None = None
    """Maximum number of a generator's samples while some wait; None: `SESSIONS` times its slots."""
    kv_room: float | None = None
    """Tokens of KV that a generator can hold; None: what the device can."""

    @property
    def step_groups(self) -> int:
        """Groups of an optimizer step."""
        samples = self.generators * self.slots
        return self.groups_per_step or max(1, samples // self.scheduler.group_size)

    def lengths(self) -> Lengths:
        """The distribution of answer lengths."""
        if self.fit is not None:
            return empirical(self.fit.lengths)
        return lognormal(self.median, self.sigma, self.longest)

    @property
    def generators_per_node(self) -> int:
        """Generators of a node; a generator that needs several nodes counts as one."""
        return max(1, self.network.gpus_per_node // self.gpus_per_generator)

    def cost(self) -> Costs:
        """Costs of the fit or the roofline. Raises UserError for an unknown model or device."""
        return self.roofline()[0] if self.fit is None else self.fit.cost

    def kv_tokens(self) -> float:
        """Return a generator's KV capacity in tokens; infinity with a fit. Raises UserError."""
        if self.kv_room is not None:
            return self.kv_room
        if self.fit is not None:
            return math.inf
        model, device = known(self.model, MODELS), known(self.device, DEVICES)
        return kv_tokens(model, device, devices=self.gpus_per_generator)

    def roofline(self) -> tuple[Cost, float]:
        """Return roofline costs, and the number of the trainer's devices. Raises UserError."""
        model, device = known(self.model, MODELS), known(self.device, DEVICES)
        costs = partial(roofline, model, device, devices_per_generator=self.gpus_per_generator)
        devices = self.trainer_devices
        if devices is None:
            one = costs(trainer_devices=1)
            rng, draw = random.Random(0), self.lengths()  # noqa: S311 - a simulation
            given = float(self.prompt_tokens)
            if self.environments is None:
                mean = sum(draw(rng) for _ in range(4000)) / 4000
            else:
                mean, observed = self.environments.mean_length()
                given += observed
            step = one.decode(self.slots, self.slots * (given + mean / 2))
            rate = self.generators * self.slots / step
            devices = rate * one.train_token_seconds * (1 + given / mean) / BALANCE
        return costs(trainer_devices=devices), devices

    @property
    def weights_bytes(self) -> float:
        """Bytes of one version of the weights. Raises UserError for an unknown model."""
        model = known(self.model, MODELS)
        return model.parameters * model.bytes_per_parameter

    @property
    def trainer_nodes(self) -> int:
        """Nodes of the trainer; one if its size is not known."""
        devices = 1.0 if self.fit is not None else self.roofline()[1]
        return max(1, math.ceil(devices / self.network.gpus_per_node))

    def simulate(self, mode: str) -> Outcome:
        """Simulate one mode of `MODES`. Raises UserError for an unknown mode."""
        if mode not in MODES:
            raise UserError(f"{mode!r} is not a mode; the modes are {', '.join(MODES)}")
        settings, ahead = MODES[mode]
        runahead = max(1, round(ahead * self.step_groups)) if ahead else None
        return self.run(replaced(self.scheduler, **settings, max_runahead_groups=runahead))

    def configured(self) -> Outcome:
        """Simulate the settings of `scheduler` unchanged."""
        return self.run(self.scheduler)

    def run(self, scheduler: SchedulerConfig) -> Outcome:
        """Simulate these settings of the scheduler."""
        config = replaced(scheduler, groups_per_step=self.step_groups)
        share = 1.0 if self.signal_share is None else self.signal_share
        if self.signal_share is not None and not config.dynamic_sampling.enabled:
            config = replaced(config, dynamic_sampling=DynamicSamplingConfig(enabled=True))
        sessions, room = 0, math.inf
        if self.environments is not None:
            sessions = SESSIONS * self.slots if self.sessions is None else self.sessions
            room = self.kv_tokens()
        setting = Setting(
            config, self.generators, self.slots, self.steps, self.cost(), self.lengths(),
            survival=Survival(self.rule, outside=self.outside, noise=self.noise),
            signal_share=share, weights_bytes=self.weights_bytes,
            generators_per_node=self.generators_per_node, trainer_nodes=self.trainer_nodes,
            sessions=sessions, kv_tokens=room,
            **{one.name: getattr(self, one.name) for one in fields_of(Conditions)},
        )  # fmt: skip
        end = self.steps - self.cool_down if self.cool_down else None
        return World(setting).run(self.warm_up, end)

    def title(self) -> str:
        """Describe the simulation in one sentence."""
        drift = f"total variation {self.drift:.2g} per token and step, acceptance by {self.rule}"
        if self.outside:
            drift += f", {100 * self.outside:.3g}% of the tokens outside the top K"
        if self.noise:
            drift += f", noise floor {self.noise:.2g} per token"
        if self.new_length:
            drift += f", {self.new_length:.0%} of rejected answers get another length"
        if self.signal_share is not None:
            drift += f", {self.signal_share:.0%} of the groups carry signal (dynamic sampling)"
        drift += conditions(self.network, self.failures, self.stragglers)
        groups = f"{self.step_groups} groups of {self.scheduler.group_size} a step"
        if self.fit is not None:
            return (
                f"simulated: {self.generators} generators of {self.slots} rows, {groups}, costs "
                f"and lengths of the run {self.fit.name}, {drift}"
            )
        gpus = f" on {self.gpus_per_generator} GPUs" if self.gpus_per_generator > 1 else ""
        answers = f"answers of {self.median:.0f} tokens (median) up to {self.longest}"
        if self.environments is not None:
            answers = self.environments.described
        return (
            f"simulated: {self.generators} generators ({self.device}, {self.model}, "
            f"{self.slots} rows{gpus} each), a trainer of {self.roofline()[1]:.0f} devices, "
            f"{groups}, {answers}, {drift}"
        )


def known(name: str, table: Mapping[str, T]) -> T:
    """Return the entry of a table. Raises UserError if it is missing."""
    if name not in table:
        raise UserError(f"unknown {name!r}: the simulator has {', '.join(table)}")
    return table[name]


def conditions(network: Network, failures: Failures, stragglers: Stragglers) -> str:
    """Describe the conditions that are not ideal; empty if all are."""
    text = ""
    if network.bandwidth_gbit is not None:
        way = "a chain" if network.fan_out == 1 else f"a tree of fan-out {network.fan_out}"
        text += f", links of {network.bandwidth_gbit:g} Gbit/s, weights by {way}"
        if network.delta_share < 1:
            text += f" with {network.delta_share:.0%} of their bytes"
    if network.latency_ms:
        text += f", latency {network.latency_ms:g} ms"
    if failures.per_node_hour:
        text += f", {failures.per_node_hour:g} {failures.scope} losses per node and hour"
    if failures.trainer_per_hour:
        text += f", {failures.trainer_per_hour:g} trainer losses per hour"
    if stragglers.share:
        text += f", {stragglers.share:.0%} of the generators {stragglers.factor:g} times as slow"
    return text


def cluster(config: RunConfig | None, fit: Fit | None, **changes: Any) -> Cluster:
    """Make a cluster with the sizes and scheduler of `config`, else of `fit`, else the defaults.

    Without `fit`, costs come from the roofline and lengths from a log-normal. `changes` override.
    """
    fields: dict[str, Any] = {}
    if fit is not None:
        config = config or fit.config
        fields |= {
            "fit": fit,
            "steps": max(fit.steps, WARM_UP + 9),
            "warm_up": WARM_UP,
            "prompt_tokens": 0,  # prefill is part of the measured cost of a step
            "rule": "block",
            "outside": fit.outside,
            "noise": fit.noise,
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
    """Return a validated copy; settings that do not apply to the `on_update` are reset."""
    fields = scheduler.model_dump() | changes
    if fields["on_update"] != "verify":
        fields["max_runahead_groups"] = None
    if fields["on_update"] == "recompute":
        fields["partial_rollout"] = True
    return SchedulerConfig(**fields)


def compare(
    cluster: Cluster, modes: Iterable[str], note: Callable[[str], None] = lambda _: None
) -> dict[str, Outcome]:
    """Simulate each mode on the same cluster; `note` takes a line for each result."""
    outcomes: dict[str, Outcome] = {}
    for mode in modes:
        outcomes[mode] = cluster.simulate(mode)
        note(f"{mode}: {outcomes[mode].step_seconds:.3g} s a step")
    return outcomes


@dataclass(frozen=True, slots=True)
class Place:
    """One place on the map of regimes."""

    median: float
    drift: float
    outcomes: dict[str, Outcome]


def regime(
    cluster: Cluster,
    *,
    medians: Sequence[float] = (1000, 4000, 16000, 32000),
    drifts: Sequence[float] = (1e-4, 3e-4, 1e-3, 1e-2),
    modes: Sequence[str] = REGIME_MODES,
    note: Callable[[str], None] = lambda _: None,
) -> list[Place]:
    """Simulate modes over answer length and drift; `longest` is four times the median."""
    places = []
    for median, drift in itertools.product(medians, drifts):
        longest = round(4 * median)
        here = replace(cluster, median=median, longest=longest, sigma=0.7, drift=drift)
        note(f"median {median:g}, total variation {drift:g}")
        places.append(Place(median, drift, compare(here, modes, note)))
    return places


def right_choice(place: Place) -> str:
    """Return the strictest of `verify` with k = 0, 1, 2 with `NEAR` the fastest speed."""
    modes = [mode for mode in ("verify", "verify, k=1", "verify, k=2") if mode in place.outcomes]
    fastest = min(place.outcomes[mode].step_seconds for mode in modes)
    return next(m for m in modes if place.outcomes[m].step_seconds * NEAR <= fastest)
