"""A scheduler with generators and a trainer, to be told events one by one."""

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler.commands import StartSample
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.events import GeneratorJoined, SampleDelivered, SampleFinished, TrainerJoined
from asyncrl.scheduler.scheduler import Scheduler


def scheduler_of(*generators, slots=4, steps=3, **settings):
    """A scheduler (two samples a group, one group a step) after the joins, and its commands."""
    keep = {"on_update": "keep", "max_off_policy_steps": 1}
    config = SchedulerConfig(**{"group_size": 2, "groups_per_step": 1, **keep, **settings})
    scheduler = Scheduler(config, first_step=0, total_steps=steps)
    commands = []
    for name in generators:
        commands += scheduler.on_event(GeneratorJoined(name, slots, 0))
    commands += scheduler.on_event(TrainerJoined(0))
    return scheduler, commands


def finish(scheduler, generator, group, samples=(0, 1), version=0):
    commands = []
    for i in samples:
        event = SampleFinished(generator, SampleId(group, i), 5, version)
        commands += scheduler.on_event(event)
    scheduler.check()
    return commands


def acknowledge(scheduler, generator, group, samples=(0, 1)):
    commands = []
    for i in samples:
        commands += scheduler.on_event(SampleDelivered(generator, SampleId(group, i)))
    scheduler.check()
    return commands


def starts(generator, *samples):
    return [StartSample(generator, SampleId(*sample)) for sample in samples]
