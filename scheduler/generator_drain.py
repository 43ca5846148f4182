"""A generator that leaves because the user has ordered it.

    GeneratorLeaves ──► ReleaseSamples ──► SamplesReleased ──► other generators start the samples
                                                  │
    acknowledgements of what is being delivered ──┴──► EndGenerator

It gets no new work at once, and its groups of which nothing was started go to others.

`on_update: verify`: its other samples, finished or not, are written to a file and move with their
tokens, which the generator that gets them verifies. Groups that are on their way to the trainer
stay until the trainer has acknowledged them. The leaving generator installs no weights any more.

`keep`, `recompute`: nothing can judge tokens that were drawn elsewhere, so the groups that it has
begun stay until they are delivered. Meanwhile it installs weights like the others.

How long it may take is for the controller to decide, which kills it then; that is a loss.
"""

from __future__ import annotations

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands, events
from asyncrl.scheduler.records import DELIVERING, HELD, RUNNING, VERIFYING, Generator
from asyncrl.scheduler.run_control import RunControl
from asyncrl.scheduler.sample_transitions import Work
from asyncrl.scheduler.state import SchedulerState


class Leaving:
    """Takes the work of leaving generators away, and ends those that have none left."""

    def __init__(self, state: SchedulerState, work: Work, run_control: RunControl) -> None:
        self._state = state
        self._work = work
        self._run_control = run_control

    def on_leaves(self, event: events.GeneratorLeaves) -> None:
        """Withdraw what is not begun; have the rest written, where tokens can be verified."""
        state = self._state
        generator = state.generators.get(event.generator)
        if generator is None and event.generator not in state.lost:
            # It has not joined yet, and so it has nothing. Its join, if it still comes, is late.
            state.lost.add(event.generator)
            state.commands.append(commands.EndGenerator(event.generator))
        if generator is None or generator.leaving:
            return
        generator.leaving = True
        state.leaving[generator.name] = generator
        state.placement.withdraw(generator)
        self._move(generator, begun=False)
        if not state.admission.verifies:
            return
        generator.draining = False  # it installs nothing any more
        samples = tuple(
            SampleId(index, sample)
            for index, group in sorted(generator.groups.items())
            for sample, sample_state in enumerate(group.states)
            if sample_state in (RUNNING, HELD, VERIFYING)
        )
        if samples:
            state.commands.append(commands.ReleaseSamples(generator.name, samples))

    def on_released(self, event: events.SamplesReleased) -> None:
        """Start elsewhere what the generator does not have any more."""
        generator = self._state.generator(event.generator)
        if generator is not None and generator.leaving and self._state.admission.verifies:
            self._move(generator, begun=True)

    def end_those_without_work(self) -> None:
        """After an event: end the leaving generators that have no group left."""
        state = self._state
        for generator in list(state.leaving.values()):
            if generator.groups:
                continue
            del state.leaving[generator.name]
            state.lost.add(generator.name)
            if generator.rewinding:
                state.outdated.add(generator.name)
            state.placement.remove(generator)
            state.commands.append(commands.EndGenerator(generator.name))
            self._run_control.end_if_stuck()

    def _move(self, generator: Generator, *, begun: bool) -> None:
        """Give groups to others that are not on their way to the trainer.

        Args:
            generator: the one that leaves.
            begun: also those of which samples were started.
        """
        stays = (DELIVERING,) if begun else (DELIVERING, RUNNING, HELD, VERIFYING)
        groups = [
            group
            for _, group in sorted(generator.groups.items())
            if not any(state in stays for state in group.states)
        ]
        for group in groups:
            self._work.take_away(group)
        for group in groups:
            self._work.place(group)
