"""Has relays fetch weights from each other: orders of `weight_routes` become messages."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import Struct

from asyncrl.errors import RunFailed
from asyncrl.fleet.process_state import Worker
from asyncrl.fleet.relays import Relays
from asyncrl.fleet.weight_routes import (
    MAX_TRIES,
    Fetch,
    Forget,
    GiveUp,
    Hopeless,
    Order,
    RelayPlace,
    Serve,
    WeightRoutes,
)
from asyncrl.launch.child_spec import weights_hub
from asyncrl.wire import RunKey
from asyncrl.wire.messages import from_relay, to_relay
from asyncrl.wire.messages.chain import Parent
from asyncrl.wire.weights.layout import WeightManifest

logger = logging.getLogger(__name__)


class WeightFetching:
    """Tells the routes what happens, and relays what follows.

    All methods raise RunFailed if a node cannot get the weights.

    Args:
        relays: of the run.
        run_key: relays get the keys of each other from it.
        send: to a process.
        cut_off: kills a process; the watchdog reports it with the reason and replaces it.
    """

    def __init__(
        self,
        relays: Relays,
        run_key: RunKey,
        send: Callable[[str, Struct], None],
        cut_off: Callable[[str, str], None],
    ) -> None:
        self._relays = relays
        self._run_key = run_key
        self._send = send
        self._cut_off = cut_off
        self._routes = WeightRoutes()
        self._published: tuple[WeightManifest, str] | None = None
        """What the routes were told, and the trainer's node."""
        self._ready: dict[str, str] = {}
        """The relay of each node that the routes were told of."""

    def manifest_at(self, node: str) -> WeightManifest | None:
        """As `WeightRoutes.manifest_at`."""
        return self._routes.manifest_at(node)

    def note_trainer(self, weights: WeightManifest | None, node: str | None) -> None:
        """The newest weights and the trainer's node; None: there is no trainer, or no place yet."""
        now = None if weights is None or node is None else (weights, node)
        if now != self._published:
            self._published = now
            routes = self._routes
            self._obey(routes.trainer_lost() if now is None else routes.published(*now))

    def note_relays(self, nodes: set[str | None]) -> set[str]:
        """Look for relays that are ready or lost; the nodes of lost ones.

        Args:
            nodes: that need weights.
        """
        ready = {node: one for node, one in self._relays.by_node().items() if node in nodes}
        lost = {
            node
            for node, name in self._ready.items()
            if node not in ready or ready[node].name != name
        }
        for node in lost:
            del self._ready[node]
            self._routes.relay_lost(node)
        for node, worker in ready.items():
            if node not in self._ready and worker.relay is not None:
                self._ready[node] = worker.name
                place = RelayPlace(worker.name, worker.relay.source, worker.relay.node)
                self._obey(self._routes.relay_ready(node, place))
        return lost

    def arrived(self, relay: Worker, message: from_relay.WeightsHere) -> None:
        """A version is on a node."""
        for name, why in message.left.items():
            logger.info("%s left %s: %s", relay.name, name, why)
        self._obey(
            self._routes.arrived(relay.name, message.attempt, message.manifest, set(message.left))
        )

    def failed(self, relay: Worker, message: from_relay.WeightsFailed) -> None:
        """A relay cannot serve or fetch a version."""
        level = logging.INFO if message.superseded else logging.WARNING
        logger.log(level, "%s: %s", relay.name, message.reason)
        self._obey(
            self._routes.failed(
                relay.name, message.attempt, message.reason, superseded=message.superseded
            )
        )

    def again(self) -> None:
        """Time has passed."""
        self._obey(self._routes.again())

    def _obey(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Serve(relay, manifest, attempt):
                    self._send(relay, to_relay.ServeWeights(manifest, attempt))
                case Forget(relay):
                    self._send(relay, to_relay.ForgetWeights())
                case Fetch(relay, manifest, parents, attempt):
                    asked = tuple(
                        Parent(name, address, self._run_key.line(weights_hub(name), relay))
                        for name, address in parents
                    )
                    self._send(relay, to_relay.FetchWeights(manifest, asked, attempt))
                case GiveUp(relay, reason):
                    self._cut_off(relay, f"it does not get the weights: {reason}")
                case Hopeless(_, reason):
                    raise RunFailed(
                        f"weights do not reach a node of the run, after {2 * MAX_TRIES} tries: "
                        f"{reason}"
                    )
