"""The inputs of a simulated run."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.simulation.cost import Costs
from asyncrl.simulation.environments import Environments
from asyncrl.simulation.failures import Failures, Stragglers
from asyncrl.simulation.lengths import Lengths, Survival
from asyncrl.simulation.network import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The common conditions of a cluster and its runs."""

    prompt_tokens: float = 200
    drift: float = 3e-4
    redraft: float = 0.7
    """Chance that a token of the old continuation is accepted as a draft after a rejection; 0: the
    old continuation is not used. No other drafting is modelled, in any mode."""
    new_length: float = 0.0
    """Chance that a rejected answer gets another length, drawn among those longer than what stays.
    0 is the best case: lengths stay. 1 is the worst: the old length is uninformative."""
    seed: int = 0
    network: Network = field(default_factory=Network)
    failures: Failures = field(default_factory=Failures)
    stragglers: Stragglers = field(default_factory=Stragglers)
    environments: Environments | None = None
    """Environments of samples of several turns; None: a sample is one turn."""


@dataclass(frozen=True, slots=True)
class Setting(Conditions):
    """One simulated run."""

    config: SchedulerConfig
    generators: int
    slots: int
    steps: int
    cost: Costs
    lengths: Lengths
    known: dict[SampleId, int] = field(default_factory=dict)
    """Lengths of answers that are drawn only after a rejection, to repeat a real run."""
    again: Callable[[SampleId, random.Random], int] | None = None
    """Draws another length of a rejected sample (`new_length`); None: `lengths` does."""
    survival: Survival = field(default_factory=Survival)
    signal_share: float = 1.0
    """Share of the groups that carry signal; with `scheduler.dynamic_sampling` only."""
    weights_bytes: float = 0.0
    generators_per_node: int = 8
    """Generator i is on node i // generators_per_node."""
    trainer_nodes: int = 1
    sessions: int = 0
    """Maximum number of samples of a generator while some wait for their environment."""
    kv_tokens: float = math.inf
    """Tokens whose keys and values a generator has room for; used with environments only."""

    @property
    def nodes(self) -> int:
        """Nodes that have generators."""
        return -(-self.generators // self.generators_per_node)
