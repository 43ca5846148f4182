"""The processes of a run: starts them, sends to them, finds dead ones, ends them."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncrl.config.launcher import LauncherConfig
from asyncrl.cores import trainer_name
from asyncrl.fleet import process_state
from asyncrl.fleet.node_files import NodeFiles
from asyncrl.fleet.pending_weight_updates import Installations
from asyncrl.fleet.process_state import GeneratorWorker, RelayWorker, TrainerRank, Worker
from asyncrl.fleet.relays import Relays
from asyncrl.fleet.shutdown import STOP_SECONDS, attended, end_all, raise_if_late
from asyncrl.launch.child_spec import GeneratorSpec, SpecsOfRun, TrainerSpec, keys_of
from asyncrl.launch.interface import Launcher, ProcessHandle
from asyncrl.monitoring.metrics.discovery import Target
from asyncrl.wire import Hub, RunKey
from asyncrl.wire.messages import to_generator, to_relay, to_trainer
from asyncrl.wire.transport.decoding import FrameRefused, Reason
from asyncrl.wire.weights.layout import WeightManifest

logger = logging.getLogger(__name__)

_ROOM_SECONDS = 10.0
"""Time without a node after which a generator is reported as waiting."""
_LATE_SECONDS = 1.0
"""If `deaths` is called this late, the controller itself was suspended or blocked in between."""


class Fleet:
    """The trainer and the generators.

    `config` has the number of generators and time limits. `specs` are the processes', before each
    gets its own name and index; `run_key` is the source of their keys.
    """

    def __init__(
        self,
        config: LauncherConfig,
        launcher: Launcher,
        specs: SpecsOfRun,
        hub: Hub[Any],
        run_key: RunKey,
    ) -> None:
        self.config = config
        self._launcher = launcher
        self._specs = specs
        self._run_key = run_key
        self._hub = hub
        self._workers: dict[str, TrainerRank | GeneratorWorker] = {}
        self._generators: dict[str, GeneratorWorker] = {}
        self.relays = Relays(config, launcher, specs.relay, run_key, self._next_index)
        self.installations = Installations(self.relays, run_key, hub.send_soon, self.cut_off)
        run = Path(specs.trainer.run_directory)
        self.files = NodeFiles(self.relays, run_key, hub.send_soon, run)
        self.ranks: list[TrainerRank] = []
        """Processes of the current trainer, by rank. They are lost and replaced together."""
        self.lineage = 0
        self.is_taken: Callable[[int], bool] = lambda _index: False
        """Tells whether a process of this index would lack its port for metrics."""
        self._restarts = self._renamed = self._started = 0
        self._ending = False
        self._last_check = time.monotonic()

    def start_all(self) -> None:
        """Start the trainer and the generators."""
        self._start_trainer()
        for index in range(self.config.generators):
            self._start_generator(f"generator-{index}", first=True)

    async def make_room(self, generators: list[int]) -> None:
        """Call `Launcher.make_room`."""
        await self._launcher.make_room(generators)

    def give_room_back(self, worker: GeneratorWorker) -> None:
        """Call `Launcher.give_room_back` for a generator that left as ordered and has ended."""
        self._launcher.give_room_back(worker.index)

    def join(self, index: int) -> str:
        """Start an ordered generator and return its name, which no other had."""
        name = f"generator-{index}"
        if name in self._workers:
            self._renamed += 1
            name = f"{name}.{self._restarts + self._renamed}"
        return self._start_generator(name, first=False)

    def leave(self, worker: GeneratorWorker) -> None:
        """Give a generator no more work; end it if it is not ready yet."""
        worker.leave_by = time.monotonic() + self.config.leave_seconds
        if not worker.is_ready:
            worker.handle.end(by_force=False)

    @property
    def ordered(self) -> list[GeneratorWorker]:
        """Living generators that were not ordered to leave, by index."""
        found = [one for one in self.every_generator if not (one.is_gone or one.is_leaving)]
        return sorted(found, key=lambda one: one.index)

    def free_indices(self, count: int) -> list[int]:
        """Return the lowest indices that no living generator has."""
        taken = {one.index for one in self.every_generator if not one.is_gone}
        return [index for index in range(len(taken) + count) if index not in taken][:count]

    def _next_index(self) -> int:
        self._started += 1
        while self.is_taken(self._started):
            logger.warning("port monitoring.port + %d is taken and left out", self._started)
            self._started += 1
        return self._started

    def _start_trainer(self) -> None:
        self.ranks = [self._start_rank(rank) for rank in range(self._specs.trainer.ranks)]

    def _start_rank(self, rank: int) -> TrainerRank:
        spec = replace(
            self._specs.trainer,
            name=trainer_name(rank, self.lineage),
            threads=self._launcher.threads,
            process_index=self._next_index(),
            lineage=self.lineage,
            relayed=self._launcher.uses_relays,
            rank=rank,
            data_address=self._specs.trainer.data_address_of(rank),
        )
        worker = self._workers[spec.name] = TrainerRank(spec, self._launch(spec))
        return worker

    def _start_generator(self, name: str, *, first: bool) -> str:
        spec = replace(
            self._specs.generator,
            name=name,
            threads=self._launcher.threads,
            process_index=self._next_index(),
            first=first,
            relayed=self._launcher.uses_relays,
        )
        worker = GeneratorWorker(spec, self._launch(spec))
        self._workers[name] = self._generators[name] = worker
        return name

    def _launch(self, spec: TrainerSpec | GeneratorSpec) -> ProcessHandle:
        keys = keys_of(self._run_key, spec.name, spec.role, relayed=spec.relayed)
        return self._launcher.start(spec, keys)

    async def send(
        self, name: str, message: to_generator.ToGenerator | to_trainer.ToTrainer | to_relay.ToRelay
    ) -> None:
        """Send to a process. A message to a dead one is dropped; `deaths` will report it."""
        self._hub.send_soon(name, message)

    async def send_trainer(self, message: to_trainer.ToTrainer) -> None:
        """Send to all ranks of the trainer, in the same place among their other messages."""
        for worker in self.ranks:
            self._hub.send_soon(worker.name, message)

    def configure(self, config: LauncherConfig) -> None:
        """Set other limits; the number of generators does not change."""
        self.config = self.relays.config = config

    @property
    def trainer(self) -> TrainerRank:
        """Rank 0 of the current trainer, the one that was started last."""
        return self.ranks[0]

    @property
    def weights(self) -> WeightManifest | None:
        """The newest published weights; None while no trainer is ready."""
        return None if self.trainer.is_gone else self.trainer.weights

    def install(
        self,
        generator: str,
        version: int,
        *,
        rebuild_kv: bool = False,
        verify: tuple[to_generator.Verify, ...] = (),
    ) -> None:
        """Make a generator install this version or a newer one; ignored without a trainer."""
        self.installations.note(self.trainer, self.lineage)
        self.installations.install(
            self._generators[generator], version, rebuild_kv=rebuild_kv, verify=verify
        )

    def look_after_weights(self) -> None:
        """Send on what the trainer has published since. Raises RunFailed if that is impossible."""
        readers = [self.trainer, *self.every_generator]  # other ranks do not read what it publishes
        nodes = (one.node for one in readers if not one.is_gone)
        self.installations.look(self.trainer, self.lineage, nodes)

    def generators(self) -> list[GeneratorWorker]:
        """Return the generators that can take work now."""
        return [worker for worker in self.every_generator if worker.state == "ready"]

    @property
    def every_generator(self) -> Iterable[GeneratorWorker]:
        """All generators that were ever started, lost ones included."""
        return self._generators.values()

    @property
    def has_generators(self) -> bool:
        """True if a generator is alive, ready or not, and not leaving."""
        return bool(self.ordered)

    @property
    def alive(self) -> list[TrainerRank | GeneratorWorker]:
        """Trainers and generators that are not known to have ended."""
        return [worker for worker in self._workers.values() if not worker.is_gone]

    @property
    def all_ready(self) -> bool:
        """True if every living process can take work."""
        return all(worker.is_ready for worker in self.alive)

    def is_ready(self, name: str) -> bool:
        """Return True if a process can take work."""
        worker = self._find(name)
        return worker is not None and worker.is_ready and not worker.is_gone

    def unready(self) -> str:
        """Return the names of the living processes that cannot take work yet."""
        return ", ".join(worker.name for worker in self.alive if not worker.is_ready)

    def what_starts(self) -> str:
        """Describe the processes that are not ready, and what each logged last."""
        return process_state.what_starts(self.alive)

    def everyone(self) -> Iterable[TrainerRank | GeneratorWorker]:
        """Return all trainers and generators that were ever started, lost ones included."""
        return self._workers.values()

    def metrics_targets(self) -> dict[str, Target]:
        """Return the metrics endpoint of each process."""
        return {
            worker.name: Target(worker.metrics_port, worker.handle.address)
            for worker in [*self.alive, *self.relays.alive]
            if worker.metrics_port is not None
        }

    def heard_from(self, name: str) -> TrainerRank | GeneratorWorker | RelayWorker | None:
        """Note that a process is alive, and return it, if it is known."""
        worker = self._find(name)
        if worker is not None:
            worker.heard = time.monotonic()
        return worker

    def _find(self, name: str) -> TrainerRank | GeneratorWorker | RelayWorker | None:
        return self._workers.get(name) or self.relays.get(name)

    def start_relays(self) -> list[str]:
        """Start missing relays (`Relays.start_missing`)."""
        nodes = (worker.node for worker in self.alive)
        return [] if self._ending else self.relays.start_missing(nodes)

    def deaths(self, *, is_held: bool = False) -> list[tuple[Worker, str]]:
        """Return processes that died since the last call, each once, and how. Kills silent ones.

        Time in which this was not called does not count as silence. None after `kill_all`. With
        `is_held` the run is paused or has no trainer, so leaving generators cannot finish or
        deliver their samples: the time since the last call does not count as their delay.
        """
        now = time.monotonic()
        missed, self._last_check = now - self._last_check, now
        self._forgive(now, missed, is_held=is_held)
        found: list[tuple[Worker, str]] = []
        if self._ending:
            return found
        if any(one.node is not None for one in self.ordered):
            for one in self.ordered:
                if one.waits_for_room:  # as long as there are others
                    one.heard = now
        for worker in [*self.alive, *self.relays.alive]:
            reason = process_state.cause_of_death(worker, now, self.config)
            if reason is not None and not process_state.left_early(worker, self.ranks):
                worker.is_gone = True
                self._hub.abandon(worker.name)
                found.append((worker, reason))
                self.relays.note_lost(worker)
        if any(worker.is_gone for worker in self.ranks):  # the others are killed, and not reported
            for rank in [one for one in self.ranks if not one.is_gone]:
                rank.is_gone = True
                rank.handle.end(by_force=True)
                self._hub.abandon(rank.name)
        return found

    def _forgive(self, now: float, missed: float, *, is_held: bool) -> None:
        if missed > _LATE_SECONDS:
            # The controller was suspended (Ctrl-Z) or blocked (a slow disk): it could not receive
            # anything; that is not the silence of others.
            for worker in [*self.alive, *self.relays.alive]:
                worker.heard = min(now, worker.heard + missed)
        if is_held or missed > _LATE_SECONDS:
            for one in self.every_generator:
                if one.leave_by is not None and not one.is_gone:
                    one.leave_by += missed

    def without_room(self) -> list[GeneratorWorker]:
        """Return generators without a node for a while, each once."""
        late = time.monotonic() - _ROOM_SECONDS
        waiting = [one for one in self.ordered if one.waits_for_room and one.started < late]
        found = [one for one in waiting if not one.is_said_to_wait]
        for worker in found:
            worker.is_said_to_wait = True
        return found

    def restart(self, lost: GeneratorWorker) -> str | None:
        """Start a generator in place of a lost one; return its name, None if not allowed."""
        if not self._may_replace(with_machine=lost.handle.lost_with_machine):
            return None
        base = lost.name.split(".")[0]
        return self._start_generator(f"{base}.{self._restarts + self._renamed}", first=False)

    def _may_replace(self, *, with_machine: bool) -> bool:
        """Return True if a process may be replaced; counts it, unless its machine was lost."""
        if self._ending:
            return False
        if with_machine:
            self._renamed += 1
            return True
        if self._restarts >= self.config.max_restarts:
            return False
        self._restarts += 1
        return True

    def restart_trainer(
        self, lost: TrainerRank, resume_from: int | None, fence: str = ""
    ) -> str | None:
        """Start a trainer in place of a lost one, or of one of its ranks; return its name.

        `resume_from` is a checkpoint's step, None for the model; `fence` its token
        (`asyncrl.trainer.checkpoint.trainer_lease`). None as for `restart`.
        """
        if not self._may_replace(with_machine=lost.handle.lost_with_machine or lost.gives_way):
            return None
        self.lineage += 1
        trainer = replace(self._specs.trainer, resume_from=resume_from, fence=fence)
        self._specs = dataclasses.replace(self._specs, trainer=trainer)
        self._start_trainer()
        return " and ".join(worker.name for worker in self.ranks)

    def refuse(self, name: str, reason: Reason, text: str) -> None:
        """Refuse a decoded message; it counts like a frame that could not be decoded."""
        self._hub.refusals.refuse(name, FrameRefused(reason, text))

    def cut_off(self, name: str, why: str) -> None:
        """Kill a process that sends invalid messages; `deaths` reports it with this reason."""
        worker = self._find(name)
        if worker is not None and not worker.is_gone:
            worker.reason = why
            worker.handle.end(by_force=True)

    def kill_all(self) -> None:
        """Kill every process now; does not wait. May be called from a signal handler."""
        self._ending = True
        for worker in [*self.alive, *self.relays.alive]:
            worker.handle.end(by_force=True)

    async def shut_down(self) -> None:
        """End every process, the trainer after a checkpoint, and wait until all have ended.

        The relays end last: the others may send through them. Raises WaitTimeout if some did not
        end in time and were killed, or files were not copied in time.
        """
        async with attended(self._hub, self.relays, lambda: self._ending, self.alive):
            killed = await end_all(self.alive, self._hub, self.config, told=self._ending)
        seconds = 0.0 if self._ending else STOP_SECONDS
        left = await self.files.finish(self._hub, seconds)
        killed |= await end_all(self.relays.alive, self._hub, self.config, told=self._ending)
        raise_if_late(killed, left)
