"""Makes generators install weights, as soon as these are in the memory of their node.

    install ──► the generator's node has the weights ──► InstallWeights
                 └─ not yet: the request waits until the node's relay has them (`weight_routes`)

A waiting request keeps the verifications that travel with it. It is sent once its version or a
newer one of the same trainer is there. It ends without an answer when its generator is lost or
rewinds, or the trainer is lost: then the caller asks again. On the trainer's node nothing waits.

A generator that could not read a file of its node's relay (the relay was killed, or had put a newer
version in its place) reports its old version. That is not an answer: the request waits again.

Weights that the trainer broadcasts are announced at once, on every node, and no relay fetches them.
A generator that did not receive them and has no file to read reports its old version, too: only
then relays fetch the version, and the request waits for that.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from asyncrl.errors import RunFailed
from asyncrl.fleet import weight_routes
from asyncrl.fleet.process_state import GeneratorWorker, RelayWorker, TrainerRank
from asyncrl.fleet.relays import Relays
from asyncrl.fleet.weight_routes import MAX_TRIES, WeightRoutes
from asyncrl.launch.child_spec import weights_hub
from asyncrl.wire import RunKey
from asyncrl.wire.messages import from_relay, to_relay
from asyncrl.wire.messages.chain import Parent
from asyncrl.wire.messages.to_generator import InstallWeights, Verify
from asyncrl.wire.weights.layout import WeightManifest


@dataclass(eq=False)
class WeightFetching:
    """Passes events to the routes, and their orders to relays.

    All methods raise RunFailed if a node cannot get the weights. `_cut_off` kills a process; the
    watchdog reports it with the reason and replaces it.
    """

    _relays: Relays
    _run_key: RunKey
    _send: Callable[[str, Struct], None]
    _cut_off: Callable[[str, str], None]
    routes: WeightRoutes = field(default_factory=WeightRoutes)
    _published: tuple[WeightManifest, str] | None = None
    _ready: dict[str, str] = field(default_factory=dict)

    def note_trainer(self, weights: WeightManifest | None, node: str | None) -> None:
        """Note the newest weights and the trainer's node; None without a trainer, or unplaced."""
        now = None if weights is None or node is None else (weights, node)
        if now != self._published:
            self._published = now
            routes = self.routes
            self._obey(routes.trainer_lost() if now is None else routes.published(*now))

    def note_relays(self, nodes: set[str | None]) -> set[str]:
        """Find relays that are ready or lost; return the nodes of lost ones that need weights."""
        ready = {node: one for node, one in self._relays.by_node().items() if node in nodes}
        names = {node: one.name for node, one in ready.items()}
        lost = {node for node, name in self._ready.items() if names.get(node) != name}
        for node in lost:
            del self._ready[node]
            self.routes.relay_lost(node)
        for node, worker in ready.items():
            said = worker.ready_message
            if node not in self._ready and said is not None:
                self._ready[node] = worker.name
                place = weight_routes.RelayPlace(worker.name, said.source, said.node)
                self._obey(self.routes.relay_ready(node, place))
        return lost

    def arrived(self, relay: RelayWorker, message: from_relay.WeightsHere) -> None:
        """Note that a version is on a node."""
        for name, why in message.left.items():
            logger.info("%s stopped fetching from %s: %s", relay.name, name, why)
        left = set(message.left)
        self._obey(self.routes.arrived(relay.name, message.attempt, message.manifest, left))

    def failed(self, relay: RelayWorker, message: from_relay.WeightsFailed) -> None:
        """Note that a relay cannot serve or fetch a version."""
        level = logging.INFO if message.superseded else logging.WARNING
        logger.log(level, "%s: %s", relay.name, message.reason)
        reason, superseded = message.reason, message.superseded
        self._obey(self.routes.failed(relay.name, message.attempt, reason, superseded=superseded))

    def again(self) -> None:
        """Retry after some time."""
        self._obey(self.routes.again())

    def _obey(self, orders: list[weight_routes.Order]) -> None:
        for order in orders:
            match order:
                case weight_routes.Serve(relay, manifest, attempt):
                    self._send(relay, to_relay.ServeWeights(manifest, attempt))
                case weight_routes.Forget(relay):
                    self._send(relay, to_relay.ForgetWeights())
                case weight_routes.Fetch(relay, manifest, parents, attempt):
                    asked = tuple(
                        Parent(name, address, self._run_key.line(weights_hub(name), relay))
                        for name, address in parents
                    )
                    self._send(relay, to_relay.FetchWeights(manifest, asked, attempt))
                case weight_routes.GiveUp(relay, reason):
                    self._cut_off(relay, f"it cannot get the weights: {reason}")
                case weight_routes.Hopeless(_, reason):
                    raise RunFailed(
                        f"weights do not reach a node of the run, after {2 * MAX_TRIES} tries: "
                        f"{reason}"
                    )


logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0
"""Interval of retries for nodes that found the newest version nowhere."""


@dataclass(slots=True)
class _Request:
    worker: GeneratorWorker
    version: int
    lineage: int
    rebuild_kv: bool
    verify: tuple[Verify, ...]
    told: WeightManifest | None = None
    failures: int = 0
    """Number of the relay's files that the generator could not read."""


@dataclass(slots=True)
class _Trainer:
    worker: TrainerRank
    offered: WeightManifest
    lineage: int

    @property
    def weights(self) -> WeightManifest:
        """The file alone, without a broadcast."""
        return replace(self.offered, broadcast=None)

    def broadcasts_newer_than(self, told: WeightManifest | None) -> bool:
        """Return True if a generator with this last manifest may receive a newer version."""
        is_newer = told is None or told.policy_version < self.offered.policy_version
        return self.offered.broadcast is not None and is_newer


@dataclass(slots=True)
class Installations:
    """The requests of one run, and the relays that fetch weights. `cut_off` kills a process."""

    relays: Relays
    run_key: RunKey
    send: Callable[[str, Struct], None]
    cut_off: Callable[[str, str], None]
    _fetching: WeightFetching = field(init=False)
    _trainer: _Trainer | None = None
    _requests: dict[str, _Request] = field(default_factory=dict)
    """Waiting and unanswered requests of generators on other nodes than the trainer's, by name."""
    _checked: set[str] = field(default_factory=set)
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._fetching = WeightFetching(self.relays, self.run_key, self.send, self.cut_off)

    def install(
        self,
        worker: GeneratorWorker,
        version: int,
        *,
        rebuild_kv: bool = False,
        verify: tuple[Verify, ...] = (),
    ) -> None:
        """Make a generator install this version or a newer one, unless there is no trainer."""
        trainer = self._trainer
        if trainer is None:
            return
        if not self.relays.are_used or worker.node == trainer.worker.node:
            message = InstallWeights(trainer.offered, rebuild_kv, trainer.lineage, verify)
            self.send(worker.name, message)
            return
        before = self._requests.get(worker.name)
        if before is not None and before.told is None:
            rebuild_kv = rebuild_kv or before.rebuild_kv
            verify = before.verify + verify
            version = max(before.version, version)
        version = min(version, trainer.weights.policy_version)
        request = _Request(worker, version, trainer.lineage, rebuild_kv, verify)
        self._requests[worker.name] = request
        if trainer.broadcasts_newer_than(None):
            self._tell(request, trainer.offered)
        else:
            self._carry_out(request)

    def drop(self, generator: str) -> None:
        """Drop the request of a generator that is lost, or answers for all requests otherwise."""
        self._requests.pop(generator, None)

    def is_answered(self, worker: GeneratorWorker, version: int) -> bool:
        """Return True if a generator's installed version answers its request."""
        request = self._requests.get(worker.name)
        if request is None or request.told is None or version >= request.told.policy_version:
            self._requests.pop(worker.name, None)
            return True
        if request.told.broadcast is None:
            logger.info("%s could not install %s", worker.name, request.told.path)
        elif self._trainer is not None and self._trainer.broadcasts_newer_than(request.told):
            self._tell(request, self._trainer.offered)
            return False
        else:
            text = "version %d did not reach %s by broadcast, so relays fetch it"
            logger.warning(text, request.told.policy_version, worker.name)
        self._ask_for(request, request.told)
        request.told = None
        if self._trainer is not None:
            self.note(self._trainer.worker, self._trainer.lineage)
        self._carry_out(request)
        return False

    def note(self, worker: TrainerRank, lineage: int) -> None:
        """Note the trainer's state. Raises RunFailed if a node cannot get the weights."""
        offered = None if worker.is_gone else worker.weights
        if self._trainer is not None and (offered is None or lineage != self._trainer.lineage):
            self._requests.clear()
        self._trainer = None if offered is None else _Trainer(worker, offered, lineage)
        if self.relays.are_used and self._relays_fetch:
            weights = None if self._trainer is None else self._trainer.weights
            self._fetching.note_trainer(weights, worker.node)

    @property
    def _relays_fetch(self) -> bool:
        if self._trainer is None or self._trainer.offered.broadcast is None:
            return True
        return any(one.told is None for one in self._requests.values())

    def look(self, worker: TrainerRank, lineage: int, nodes: Iterable[str | None]) -> None:
        """Note the trainer and the relays, and send what has become possible.

        `nodes` are those of rank 0 of the trainer and of living generators, None if unplaced; only
        they need weights. Raises RunFailed as `note`.
        """
        if self.relays.are_used:
            self._checked -= self._fetching.note_relays(set(nodes))
        self.note(worker, lineage)
        now = time.monotonic()
        if now - self._looked >= _AGAIN_SECONDS and self._relays_fetch:
            self._looked = now
            self._fetching.again()
        self._carry_out_all()

    def arrived(self, relay: RelayWorker, message: from_relay.WeightsHere) -> None:
        """Note that a version is on a node."""
        self._fetching.arrived(relay, message)
        self._carry_out_all()

    def failed(self, relay: RelayWorker, message: from_relay.WeightsFailed) -> None:
        """Note that a relay cannot serve or fetch a version. Raises RunFailed as `look`."""
        trainer = self._trainer
        if message.superseded and trainer is not None and relay.node == trainer.worker.node:
            self.check(trainer.worker)  # a newer version is on its way, or the file is gone
        self._fetching.failed(relay, message)

    def check(self, trainer: TrainerRank) -> None:
        """End the trainer if the file of weights that a generator could not install is gone."""
        weights = trainer.weights
        if weights is None or trainer.reason or trainer.node is None:
            return
        if not self.relays.are_used:
            if not Path(weights.path).exists():
                self.cut_off(trainer.name, f"its published weights {weights.path} were removed")
            return
        relay = self.relays.on(trainer.node)
        if relay is not None:
            self.send(relay.name, to_relay.CheckWeights(weights.path))

    def checked(self, relay: RelayWorker, message: from_relay.WeightsChecked) -> None:
        """Take a relay's check of its node's file: the process that lost its file is restarted."""
        node = relay.node
        if node is not None:
            self._checked.discard(node)
        if not message.exists and node is not None:
            here, trainer = self._fetching.routes.manifest_at(node), self._trainer
            if here is not None and here.path == message.path:
                is_its_own = trainer is not None and trainer.weights == here
                name = trainer.worker.name if trainer is not None and is_its_own else relay.name
                self.cut_off(name, f"its published weights {message.path} were removed")
                return
        self._carry_out_all()

    def _carry_out_all(self) -> None:
        for request in self._requests.values():
            if request.told is None:
                self._carry_out(request)

    def _carry_out(self, request: _Request) -> None:
        node = request.worker.node
        if node is None or node in self._checked:
            return
        here = self._fetching.routes.manifest_at(node)
        if here is None or here.policy_version < request.version:
            return
        self._tell(request, here)

    def _tell(self, request: _Request, weights: WeightManifest) -> None:
        request.told = weights
        message = InstallWeights(weights, request.rebuild_kv, request.lineage, request.verify)
        self.send(request.worker.name, message)

    def _ask_for(self, request: _Request, told: WeightManifest) -> None:
        """Handle an unreadable file: unless another has replaced it, ask the relay for it."""
        node = request.worker.node
        relay = None if node is None else self.relays.on(node)
        if node is None or relay is None or self._fetching.routes.manifest_at(node) != told:
            return
        request.failures += 1
        if request.failures > MAX_TRIES:
            self.cut_off(
                request.worker.name, f"it cannot read {told.path}, which {relay.name} has written"
            )
        self._checked.add(node)
        self.send(relay.name, to_relay.CheckWeights(told.path))
