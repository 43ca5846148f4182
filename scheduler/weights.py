"""Weights: each generator's policy version, and which one it installs next."""

from __future__ import annotations

from asyncrl.scheduler import events
from asyncrl.scheduler.errors import SenderOutOfStep
from asyncrl.scheduler.records import Generator
from asyncrl.scheduler.sample_transitions import Work
from asyncrl.scheduler.state import SchedulerState


class Weights:
    """Brings each generator to the latest published version, with one install at a time."""

    def __init__(self, state: SchedulerState, work: Work) -> None:
        self._state = state
        self._work = work

    def publish(self, version: int) -> None:
        """Make all generators install a version. Raises SenderOutOfStep if it cannot exist yet."""
        state = self._state
        if not state.had_trainer or version > state.next_undeclared:
            raise SenderOutOfStep(
                f"weights of policy version {version} were published, but step {version - 1} "
                "cannot have been trained yet"
            )
        state.published = version
        self.update_all()

    def update_all(self) -> None:
        """Update every generator."""
        for generator in self._state.generators.values():
            self.update(generator)

    def update(self, generator: Generator) -> None:
        """Command the latest version unless the generator has it or is still installing another.

        With `partial_rollout: false` the generator first drains: it finishes its samples.
        """
        state = self._state
        if not state.trainer_joined or generator.rewinding or self._work.gives_away(generator):
            return
        if generator.installing is None and generator.version < state.published:
            busy = generator.running + generator.verifying
            stands_still = generator.version < 0  # its weights are of a policy that is gone
            waits = bool(busy) and not stands_still
            generator.draining = waits and not state.config.partial_rollout
            if not generator.draining:
                self._work.install(generator, state.published)
        state.placement.offer(generator, state.published)

    def refill(self, generator: Generator) -> None:
        """Install the weights that waited for an ended sample, or start another sample."""
        if generator.draining:
            self.update(generator)
        else:
            self._work.start(generator)

    def on_weights_installed(self, event: events.WeightsInstalled) -> None:
        """Verify what the new version allows, command newer weights if any, and start samples."""
        state, work = self._state, self._work
        generator, version = state.generator(event.generator), event.policy_version
        if generator is None or generator.rewinding:
            return  # a rewind answers for the installations before it
        if version > state.published or not state.had_trainer:
            raise SenderOutOfStep(
                f"generator {generator.name} installed policy version {version}, which was never "
                f"published; the latest published version is {state.published}"
            )
        if version < generator.version:
            return
        if state.places is not None:
            state.places.changed = True  # something may be verified now
        target = generator.installing
        if target is not None and version == generator.version:
            if state.next_undeclared <= target:
                return  # a repeated old answer: no newer weights can have overwritten the target
            if target == state.published:
                # The target was overwritten while it was read. The generator is ordered to install
                # again when the newer weights are published; an earlier command would fail too.
                generator.installing = None
                state.placement.offer(generator, state.published)
                work.start(generator)
                return
        self.has_version(generator, version)

    def has_version(self, generator: Generator, version: int) -> None:
        """Note a generator's version, and act on it."""
        work = self._work
        before, generator.version = generator.version, version
        generator.installing, generator.draining = None, False
        # Verification comes before the next install: with `partial_rollout: false`, that install
        # waits for the samples being verified as well.
        work.verify_due(generator, before)
        self.update(generator)
        work.place_waiting()
        work.start(generator)
