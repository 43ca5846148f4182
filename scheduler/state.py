"""Everything the scheduler knows, as plain data. No decisions are made here.

Each field has one writer, named next to it; invariants and views only read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler.admission import Admission
from asyncrl.scheduler.commands import Command, FinishRun
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.dynamic_ledger import DynamicLedger, Places
from asyncrl.scheduler.errors import ImpossibleEvent, SchedulerError
from asyncrl.scheduler.ledger import Ledger
from asyncrl.scheduler.placement import Placement
from asyncrl.scheduler.records import Generator, Group


@dataclass(slots=True, eq=False)
class SchedulerState:
    """The state that events change and that commands follow from."""

    config: SchedulerConfig
    admission: Admission
    total_steps: int
    ledger: Ledger
    """The groups that were issued, arrived in the trainer, failed and were consumed (`Steps`)."""
    placement: Placement
    """The groups of each generator (`Work`)."""
    generators: dict[str, Generator]
    """Live generators, by name. The same dictionary as `placement.generators`."""
    last_step: int
    """The last step to be trained; a stop request lowers it (`RunControl`)."""
    published: int
    """Latest policy version that can be installed, once the trainer has joined (`Scheduler`)."""
    next_undeclared: int
    """The first step whose membership is not declared yet (`Steps`)."""
    places: Places | None = None
    """The expected step of each group, with dynamic sampling (`DynamicSampling`)."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Groups neither in the trainer nor failed, by index (`Work`)."""
    lost: set[str] = field(default_factory=set)
    """Names of generators that were lost or have left (`Scheduler`, `Leaving`)."""
    leaving: dict[str, Generator] = field(default_factory=dict)
    """Generators that were ordered to leave and have samples, by name (`Leaving`)."""
    commands: list[Command] = field(default_factory=list)
    """Commands of the current event so far. Always the same list object; `Scheduler` empties it
    before each event."""
    trainer_joined: bool = False
    """True while a trainer can take trajectories (`Rewind`)."""
    trainer_lost: bool = False
    """True while a lost trainer's replacement has not joined yet (`Rewind`)."""
    lineage: int = 0
    """Lineage of the trainer that joined last (`Rewind`)."""
    outdated: set[str] = field(default_factory=set)
    """Lost generators whose late acknowledgements are an earlier trainer's (`Rewind`,
    `Scheduler`)."""
    paused: bool = False
    """While true, no sample is started (`RunControl`)."""
    stopping: bool = False
    """True once the user has asked to stop (`RunControl`)."""
    finished: FinishRun | None = None
    """The command that ended the run (`Steps`)."""

    @classmethod
    def new(
        cls,
        config: SchedulerConfig,
        first_step: int,
        total_steps: int,
        changes: Mapping[int, SchedulerConfig] = MappingProxyType({}),
        first_groups: Mapping[int, int] = MappingProxyType({}),
    ) -> SchedulerState:
        """Create the state of a run. Raises SchedulerError without a step to train."""
        if not 0 <= first_step < total_steps:
            raise SchedulerError(
                f"first_step {first_step} must be at least 0 and below total_steps {total_steps}"
            )
        placement = Placement(config.group_size)
        ledger, places = Ledger(groups_per_step=config.groups_per_step, first_step=first_step), None
        if config.max_groups_of_step is not None:
            ledger = DynamicLedger(
                groups_per_step=config.groups_per_step,
                max_groups=config.max_groups_of_step,
                first_step=first_step,
                first_groups=first_groups,
            )
            places = Places(config, ledger)
        return cls(
            config=config,
            admission=Admission.of(config, changes),
            total_steps=total_steps,
            ledger=ledger,
            places=places,
            placement=placement,
            generators=placement.generators,
            last_step=total_steps - 1,
            published=first_step,
            next_undeclared=first_step,
        )

    @property
    def had_trainer(self) -> bool:
        """True if a trainer has ever joined."""
        return self.trainer_joined or self.trainer_lost

    @property
    def step(self) -> int:
        """The current step: the next one to be trained, or the one in training."""
        return self.ledger.next_step

    @property
    def next_place(self) -> int:
        """Place of the group that is issued next: its index, without dynamic sampling."""
        if self.places is None or self.places.step < 0:
            return self.ledger.next_group
        return self.places.next_place

    def step_of(self, group: int) -> int:
        """The step that a group in flight is expected in."""
        found = self.groups.get(group)
        return group // self.config.groups_per_step if found is None else found.step

    @property
    def last_begun_step(self) -> int:
        """The last step up to which every group has a started sample; before `step` if none is."""
        waiting = [one.place for one in self.groups.values() if one.untouched]
        first = min([*waiting, self.next_place])
        return max(first // self.config.groups_per_step, self.next_undeclared) - 1

    def groups_begun_after(self, step: int) -> int:
        """Count groups of later steps of which a sample was started."""
        flying = sum(one.step > step and not one.untouched for one in self.groups.values())
        if self.places is not None:
            return flying  # what is settled belongs to the step that is not decided yet
        last = (self.ledger.next_group - 1) // self.config.groups_per_step
        settled = (self.ledger.progress(later)[0] for later in range(step + 1, last + 1))
        return flying + sum(settled)

    @property
    def first_free_step(self) -> int:
        """The first step of which no group can ever have been issued."""
        if isinstance(self.ledger, DynamicLedger):
            # Each step looks at groups_per_step groups at least.
            first = self.ledger.first_group_of(self.next_undeclared)
            ahead = max(0, self.ledger.issued_below - first)
            return self.next_undeclared - (-ahead // self.config.groups_per_step)
        return -(-self.ledger.issued_below // self.config.groups_per_step)

    @property
    def last_open_group(self) -> int:
        """Work is admitted for groups up to this one; with dynamic sampling, up to this place."""
        per_step = self.config.groups_per_step
        if not self.trainer_joined or self.finished is not None:
            return self.step * per_step - 1
        # A version can be published before its StepFinished arrives: nothing opens until then.
        version = min(self.published, self.step)
        last = self.admission.last_group(version, ahead=True)
        return min(last, (self.last_step + 1) * per_step - 1)

    def generator(self, name: str) -> Generator | None:
        """Return a generator, None if it was lost. Raises ImpossibleEvent if it never joined."""
        generator = self.generators.get(name)
        if generator is None and name not in self.lost:
            raise ImpossibleEvent(f"received an event of generator {name}, which never joined")
        return generator

    def group(self, sample: SampleId) -> Group | None:
        """Return a sample's group, None if settled. Raises ImpossibleEvent if it is unknown."""
        group = self.groups.get(sample.group)
        if group is None and not 0 <= sample.group < self.ledger.issued_below:
            raise ImpossibleEvent(
                f"received an event of sample {sample}, whose group was never issued"
            )
        if not 0 <= sample.sample < self.config.group_size:
            raise ImpossibleEvent(
                f"received an event of sample {sample}, but groups have "
                f"{self.config.group_size} samples"
            )
        return group
