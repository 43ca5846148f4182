"""The trainer is lost, and another one continues from the newest checkpoint.

The new trainer has version v, the lost one had trained up to version s >= v (and may not have
reported its last step). The policies v + 1 to s are gone: the new trainer will train other ones
under these numbers. So everything that depends on them is undone:

    ledger           returns to step v; the steps from v on consume their groups again
    trainer          groups that were in it, or partly or perhaps in it, are generated again
    generators       are told (`RewindGenerator`): they relabel tokens of later versions as those of
                     an unknown policy and install weights of the new trainer
    `verify`         keeps all other work. Held samples count as too old until their generator has
                     verified them, or has answered that they need no verification
    `keep`, `recompute`   discard all work if a version is gone; these modes cannot verify a token

A group that is kept may lie ahead of the groups that are issued again. It waits: it is delivered
when it has been issued.

From `RewindGenerator` to `GeneratorRewound` nothing that a generator reports is taken for a fact
of the new lineage, since messages may be on their way: acknowledgements are ignored, and the
version of a finished sample counts as unknown. Acknowledgements of a generator that is lost before
it answered are ignored for good.

While there is no trainer, generators continue, no group is issued, and nothing is delivered. A
stopping run does not wait for another trainer: it ends, and resumes from the newest checkpoint.
"""

from __future__ import annotations

from asyncrl.scheduler import commands, events
from asyncrl.scheduler.commands import RunOutcome
from asyncrl.scheduler.errors import SenderOutOfStep
from asyncrl.scheduler.records import DELIVERED, DELIVERING, Group
from asyncrl.scheduler.sample_transitions import Work
from asyncrl.scheduler.state import SchedulerState
from asyncrl.scheduler.steps import Steps
from asyncrl.scheduler.weights import Weights


class Rewind:
    """Handles the events of trainers: the first one, lost ones, and those that replace them."""

    def __init__(self, state: SchedulerState, work: Work, steps: Steps, weights: Weights) -> None:
        self._state = state
        self._work = work
        self._steps = steps
        self._weights = weights

    def on_trainer_joined(self, event: events.TrainerJoined) -> None:
        """Begin, or return to the version of a trainer that replaces a lost one."""
        state = self._state
        first = not state.had_trainer
        if not first and event.lineage <= state.lineage:
            return
        version, expected = event.policy_version, state.published
        if version != expected if first else version > state.next_undeclared:
            raise SenderOutOfStep(
                f"the trainer joined with policy version {version}, but version {expected} is "
                "expected; resume the run from the checkpoint of that version"
            )
        state.trainer_joined, state.trainer_lost = True, False
        state.lineage = event.lineage
        if first:
            self._weights.update_all()
            self._steps.open()
        elif not self._has_ended(version):
            self._return_to(version)
        elif version == state.published:
            for generator in state.generators.values():
                generator.installing = None  # what the lost trainer published is removed
            self._weights.update_all()

    def on_trainer_lost(self, _: events.TrainerLost) -> None:
        """Deliver nothing until another trainer joins; end a run that is stopping."""
        state = self._state
        if not state.trainer_joined:
            return
        state.trainer_joined, state.trainer_lost = False, True
        for generator in state.generators.values():
            generator.draining = False  # there are no new weights to wait for
        if state.stopping and state.finished is None:
            self._steps.end_run(
                RunOutcome.STOPPED,
                f"step {state.step} was not trained, since the trainer was lost while the run was "
                "stopping",
            )

    def on_generator_rewound(self, event: events.GeneratorRewound) -> None:
        """Give a generator work again."""
        state = self._state
        generator = state.generator(event.generator)
        if generator is None or not generator.rewinding or event.lineage != state.lineage:
            return
        generator.rewinding = False
        if state.places is not None:
            state.places.changed = True
        self._weights.has_version(generator, min(event.policy_version, state.published))
        for group in list(generator.groups.values()):
            self._work.deliver_if_complete(group)

    def _has_ended(self, version: int) -> bool:
        """Whether the run is over. A run that was done is not if its last steps are gone."""
        state = self._state
        done = state.finished is not None and state.finished.outcome is RunOutcome.DONE
        if done and not state.stopping and version < state.total_steps:
            state.finished = None
        return state.finished is not None

    def _return_to(self, version: int) -> None:
        state = self._state
        are_gone = version < state.published
        # These were trained, but the trainer was lost before it said so.
        for step in range(state.step, version):
            state.ledger.consume(step, state.ledger.membership(step) or ())
        state.ledger.rewind(version)
        if state.places is not None:
            state.places.restart()
        state.published = state.next_undeclared = version
        state.outdated |= state.lost
        keeps_work = state.admission.verifies or not are_gone
        groups = list(state.groups.values())
        self._work.discard([g for g in groups if not keeps_work or _may_be_in_trainer(g)])
        for group in state.groups.values():
            group.sent = bytearray(len(group.sent))
            if state.admission.verifies:
                self._work.suspect(group)
        for generator in state.generators.values():
            generator.version, generator.installing = -1, version
            generator.requested = {}
            generator.rewinding, generator.draining = True, False
            state.placement.offer(generator, version)
            state.commands.append(commands.RewindGenerator(generator.name, version, state.lineage))
        self._steps.open()
        self._work.place_waiting()


def _may_be_in_trainer(group: Group) -> bool:
    """Whether the lost trainer had a sample of the group, or may have had one."""
    return DELIVERED in group.states or DELIVERING in group.states
