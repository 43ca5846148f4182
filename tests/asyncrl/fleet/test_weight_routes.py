"""Who fetches which weights from whom."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

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
from asyncrl.wire.weights.chunks import name_of
from asyncrl.wire.weights.layout import WeightManifest


def published(version: int, lineage: int = 0) -> WeightManifest:
    trainer = "trainer" if not lineage else f"trainer.{lineage}"
    return WeightManifest(version, f"/shm/asyncrl-run-{trainer}-weights-{version % 2}", 64, ())


def place(name: str) -> RelayPlace:
    return RelayPlace(name, f"{name}/source", f"{name}/node")


class Routes:
    """The machine, and the orders that are not answered."""

    def __init__(self, nodes: str = "abcd") -> None:
        self.routes = WeightRoutes()
        self.open: dict[str, Serve | Fetch] = {}
        self.done: list[Order] = []
        self.relays: dict[str, str] = {}
        for node in nodes:
            self.ready(node, node.upper())

    def note(self, orders: Iterable[Order]) -> list[Order]:
        found = list(orders)
        for order in found:
            self.done.append(order)
            if isinstance(order, Serve | Fetch):
                self.open[order.relay] = order
        return found

    def ready(self, node: str, relay: str) -> list[Order]:
        self.relays[relay] = node
        return self.note(self.routes.relay_ready(node, place(relay)))

    def lose(self, node: str, relay: str) -> None:
        self.open.pop(relay, None)
        del self.relays[relay]
        self.routes.relay_lost(node)

    def publish(self, version: int, home: str = "a", lineage: int = 0) -> list[Order]:
        return self.note(self.routes.published(published(version, lineage), home))

    def arrive(self, relay: str, *left: str) -> list[Order]:
        order = self.open.pop(relay)
        manifest = replace(order.manifest, path=f"/{relay}/{name_of(order.manifest)}")
        return self.note(self.routes.arrived(relay, order.attempt, manifest, set(left)))

    def fail(self, relay: str, *, superseded: bool = False) -> list[Order]:
        order = self.open.pop(relay)
        return self.note(
            self.routes.failed(relay, order.attempt, f"{relay} is sad", superseded=superseded)
        )

    def here(self, node: str) -> int | None:
        manifest = self.routes.manifest_at(node)
        return None if manifest is None else manifest.policy_version

    def parents(self) -> dict[str, str]:
        """Whom each relay that fetches was told to ask, the nearest first."""
        fetches = (order for order in self.open.values() if isinstance(order, Fetch))
        return {one.relay: " ".join(address for _, address in one.parents) for one in fetches}


def test_nodes_stand_in_a_row_behind_the_trainers() -> None:
    run = Routes()
    assert run.publish(1) == [
        Serve("A", published(1), 1),
        Fetch("B", published(1), (("A", "A/source"),), 2),
        Fetch("C", published(1), (("B", "B/node"), ("A", "A/source")), 3),
        Fetch("D", published(1), (("C", "C/node"), ("B", "B/node"), ("A", "A/source")), 4),
    ]
    assert [run.here(node) for node in "abcd"] == [1, None, None, None]
    run.arrive("C")
    assert [run.here(node) for node in "abcd"] == [1, None, 1, None]
    manifest = run.routes.manifest_at("c")
    assert manifest is not None
    assert manifest.path.startswith("/C/"), "the file of its node"


def test_a_version_on_its_way_comes_before_a_newer_one() -> None:
    run = Routes("abc")
    run.publish(1)
    run.arrive("B")
    assert [type(order) for order in run.publish(2)] == [Serve, Fetch], "C is still fetching"
    assert run.here("b") == 1
    [fetch] = run.arrive("C")
    assert run.here("c") == 1
    assert isinstance(fetch, Fetch)
    assert fetch.manifest == published(2)


def test_a_relay_that_is_ready_late_is_told_then() -> None:
    run = Routes("")
    assert run.publish(3) == []
    assert run.ready("b", "B") == [], "there is nobody to ask"
    assert run.here("b") is None
    orders = run.ready("a", "A")
    assert [type(order) for order in orders] == [Serve, Fetch]
    assert run.parents() == {"B": "A/source"}


def test_a_joiner_asks_the_nearest_nodes_that_have_the_version() -> None:
    run = Routes("abcd")
    run.publish(1)
    run.arrive("B")
    run.arrive("D")
    run.ready("e", "E")
    assert run.parents()["E"] == "D/node C/node B/node A/source"
    run.lose("b", "B")
    run.ready("b", "B.1")
    assert run.parents()["B.1"] == "D/node A/source", "C waits for B: they do not wait in a circle"


def test_a_node_that_was_left_stands_last_in_the_next_row() -> None:
    run = Routes("abcd")
    run.publish(1)
    run.arrive("B")
    run.arrive("C", "B", "nobody")
    run.arrive("D")
    run.publish(2)
    assert run.parents() == {
        "C": "A/source",
        "D": "C/node A/source",
        "B": "D/node C/node A/source",
    }


def test_a_new_lineage_has_other_files_and_another_home() -> None:
    run = Routes("abc")
    run.publish(5)
    run.arrive("B")
    assert run.here("b") == 5
    assert run.routes.trainer_lost() == [Forget("A")]
    assert [run.here(node) for node in "abc"] == [None, None, None]
    late = run.open["C"]
    run.publish(5, home="c", lineage=1)
    assert run.here("b") is None, "version 5 of the lost trainer is another one"
    assert run.routes.arrived("C", late.attempt, published(5), set()) == []
    assert run.parents() == {"A": "C/source", "B": "A/node C/source"}
    run.arrive("A")
    assert [run.here(node) for node in "abc"] == [5, None, 5]


def test_a_trainer_that_takes_over_without_a_word_has_other_files_too() -> None:
    run = Routes("ab")
    run.publish(5)
    run.arrive("B")
    run.publish(5, lineage=1)
    assert run.here("b") is None


def test_when_the_source_is_replaced_all_that_is_on_its_way_begins_anew() -> None:
    run = Routes("abcd")
    run.publish(1)
    run.arrive("B")
    run.lose("a", "A")
    assert run.here("a") == 1, "the trainer's file is there without a relay"
    assert run.parents()["C"] == "B/node A/source"
    orders = run.ready("a", "A.1")
    assert orders[0] == Serve("A.1", published(1), 5)
    assert run.parents() == {"C": "B/node A.1/source", "D": "C/node B/node A.1/source"}


def test_failures_are_tried_again_then_the_relay_then_the_node_is_given_up() -> None:
    run = Routes("ab")
    run.publish(1)
    for _ in range(MAX_TRIES - 1):
        [order] = run.fail("B")
        assert isinstance(order, Fetch)
    assert run.fail("B") == [GiveUp("B", "B is sad")]
    run.lose("b", "B")
    run.ready("b", "B.1")
    for _ in range(MAX_TRIES - 1):
        run.fail("B.1")
    assert run.fail("B.1") == [Hopeless("b", "B.1 is sad")]


def test_an_arrival_ends_the_count_of_failures() -> None:
    run = Routes("ab")
    for version in range(3 * MAX_TRIES):
        run.publish(version)
        run.fail("B")
        run.arrive("B")
    assert not any(isinstance(order, GiveUp | Hopeless) for order in run.done)


def test_the_source_may_fail_now_and_then() -> None:
    run = Routes("ab")
    for version in range(3 * MAX_TRIES):
        run.publish(version)
        assert run.fail("A") == [GiveUp("A", "A is sad")]
        run.lose("a", "A")
        run.ready("a", "A")
    assert not any(isinstance(order, Hopeless) for order in run.done)


def test_a_source_that_cannot_serve_is_given_up_unless_it_was_too_late() -> None:
    run = Routes("ab")
    run.publish(1)
    assert run.fail("A", superseded=True) == []
    assert [type(order) for order in run.note(run.routes.again())] == [Serve]
    assert run.fail("A") == [GiveUp("A", "A is sad")]


def test_nobody_has_it_any_longer() -> None:
    run = Routes("ab")
    run.publish(1)
    run.publish(2)
    [order] = run.fail("B", superseded=True)
    assert isinstance(order, Fetch)
    assert order.manifest == published(2), "a newer one is known"
    assert run.fail("B", superseded=True) == [], "news of the next one may be on its way"
    [order] = run.note(run.routes.again())
    assert isinstance(order, Fetch)
    assert run.routes.again() == []
    assert run.fail("B", superseded=True) == []
    assert len(run.publish(3)) == 2


def test_late_answers_are_ignored() -> None:
    run = Routes("ab")
    run.publish(1)
    old = run.open["B"]
    run.lose("b", "B")
    assert run.routes.arrived("B", old.attempt, published(1), set()) == []
    run.ready("b", "B.1")
    assert run.routes.failed("B.1", old.attempt, "", superseded=False) == []
    assert run.here("b") is None


NODES = "abcde"


class Adventure(Routes):
    """A run to which anything may happen. `index` chooses a node, or a relay that was told."""

    def __init__(self) -> None:
        super().__init__("ab")
        self.version, self.lineage, self.home = 1, 0, "a"
        self.publish(1)
        self.names = 0

    def chosen(self, index: int) -> str | None:
        """A relay that was told to fetch."""
        relays = sorted(name for name, order in self.open.items() if isinstance(order, Fetch))
        return relays[index % len(relays)] if relays else None

    def living(self, node: str) -> str | None:
        return next((relay for relay, place in self.relays.items() if place == node), None)

    def on_publish(self, _index: int) -> None:
        self.version += 1
        self.publish(self.version, self.home, self.lineage)

    def on_move(self, index: int) -> None:
        """Another trainer continues elsewhere from an older version."""
        self.note(self.routes.trainer_lost())
        self.version, self.lineage = max(0, self.version - index), self.lineage + 1
        self.home = NODES[index]
        self.publish(self.version, self.home, self.lineage)

    def on_lose(self, index: int) -> None:
        relay = self.living(NODES[index])
        if relay is not None:
            self.lose(NODES[index], relay)

    def on_ready(self, index: int) -> None:
        if self.living(NODES[index]) is None:
            self.names += 1
            self.ready(NODES[index], f"{NODES[index].upper()}.{self.names}")

    def on_arrive(self, index: int) -> None:
        relay = self.chosen(index)
        if relay is not None:
            self.arrive(relay)

    def on_left(self, index: int) -> None:
        relay = self.chosen(index)
        if relay is not None:
            self.arrive(relay, *sorted(self.relays)[:index])

    def on_gone(self, index: int) -> None:
        relay = self.chosen(index)
        if relay is not None:
            self.fail(relay, superseded=True)


KINDS = ["publish", "move", "lose", "ready", "arrive", "left", "gone"]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 4)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_every_node_gets_the_newest_version_whatever_happens(events: list[tuple[str, int]]) -> None:
    """Random events, then quiet: every order is answered, every node has a relay."""
    run = Adventure()
    for what, index in events:
        getattr(run, f"on_{what}")(index)
        for order in run.open.values():
            if isinstance(order, Fetch):
                assert order.relay not in dict(order.parents)
        check_no_circle(run)
    for index in range(len(NODES)):
        run.on_ready(index)
    for _ in range(20):
        for relay in sorted(run.open):
            if isinstance(run.open[relay], Fetch):
                run.arrive(relay)
        run.note(run.routes.again())
    assert [run.here(node) for node in NODES] == [run.version] * len(NODES)


def check_no_circle(run: Routes) -> None:
    """No relays whose nearest parents all wait for each other: the last parent is the source."""
    waits = {
        one.relay: {name for name, address in one.parents if address.endswith("/node")}
        for one in run.open.values()
        if isinstance(one, Fetch)
    }
    while waits:
        free = [relay for relay, parents in waits.items() if not parents & waits.keys()]
        if not free:
            pytest.fail(f"they wait in a circle: {waits}")
        for relay in free:
            del waits[relay]
