"""The chain's machines in simulated time: right bytes or a named error, and nobody is held up."""

from __future__ import annotations

import math

import pytest
from chain_world import TIMING, World
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.wire.messages.chain import Ask
from asyncrl.wire.weights.chain.receiving import Receiving
from asyncrl.wire.weights.chain.serving import MAX_ASKS, WAITING_SECONDS, Serving, State

CHUNKS = 150
TICKS = 4


def alone() -> float:
    """Seconds until one receiver has it."""
    return World(CHUNKS, [TICKS, TICKS]).run().seconds(1)


def test_a_chain_of_eight_takes_little_longer_than_one() -> None:
    world = World(CHUNKS, [TICKS] * 9).run()
    assert all(world.whole(i) for i in range(9))
    assert world.seconds(8) < alone() + 8 * 4 * TICKS / 1000
    for node in world.nodes.values():
        assert node.receiving is None or node.receiving.left == {}
    assert all(node.sent <= 1.15 * CHUNKS for node in world.nodes.values())


def test_a_slow_node_keeps_no_children() -> None:
    """Node 2 sends at a twentieth; without re-parenting 3 and 4 would need 20 times as long."""
    world = World(CHUNKS * 4, [TICKS, TICKS, 20 * TICKS, TICKS, TICKS]).run()
    assert all(world.whole(i) for i in range(5))
    assert world.nodes["n3"].receiving is not None
    assert "slower than n1" in world.nodes["n3"].receiving.left["n2"]
    assert world.seconds(4) < 2.5 * 4 * alone()


@pytest.mark.parametrize("slowness", [5, 10, 20, 40])
def test_only_the_child_of_a_slow_node_leaves_it(slowness: int) -> None:
    """Those below wait until it has moved up: otherwise all of them would, to one parent."""
    world = World(CHUNKS * 4, [TICKS, TICKS, slowness * TICKS, TICKS, TICKS, TICKS, TICKS]).run()
    assert all(world.whole(i) for i in range(7))
    for i in (4, 5, 6):
        receiving = world.nodes[f"n{i}"].receiving
        assert receiving is not None
        assert receiving.left == {}


def test_children_of_a_dead_node_move_up() -> None:
    world = World(CHUNKS, [TICKS] * 5, dies={2: 200}).run()
    assert all(world.whole(i) for i in (1, 3, 4))
    assert not world.whole(2)
    assert world.seconds(4) < 2 * alone() + TIMING.silent_seconds


def test_a_node_without_a_link_to_its_parent_takes_the_next() -> None:
    world = World(CHUNKS, [TICKS] * 4, cut={(1, 2): (100, 10**6)}).run()
    assert all(world.whole(i) for i in (1, 2, 3))


def test_a_node_without_any_link_says_whom_it_asked() -> None:
    cut = {(i, 2): (100, 10**6) for i in (0, 1, 3)}
    world = World(CHUNKS, [TICKS] * 4, cut=cut).run()
    assert world.whole(3)
    receiving = world.nodes["n2"].receiving
    assert receiving is not None
    assert receiving.failed.startswith("incomplete after 6 s (")
    assert "n1: silent for" in receiving.failed or "n1: asked" in receiving.failed
    assert not receiving.superseded


def test_a_cut_that_heals_is_survived() -> None:
    cut = {(0, 1): (100, 1500)}
    world = World(CHUNKS, [TICKS] * 3, cut=cut).run()
    assert world.whole(1)
    assert world.whole(2)


def test_damaged_chunks_are_asked_of_another_parent() -> None:
    world = World(CHUNKS, [TICKS] * 4, liars=frozenset({1})).run()
    assert all(world.whole(i) for i in (1, 2, 3))
    receiving = world.nodes["n2"].receiving
    assert receiving is not None
    assert "damaged" in receiving.left["n1"]


def test_a_version_that_nobody_has_any_longer_is_given_up_at_once() -> None:
    world = World(CHUNKS, [TICKS] * 4, source_loses=200).run()
    for i in (1, 2, 3):
        receiving = world.nodes[f"n{i}"].receiving
        assert receiving is not None
        assert receiving.superseded
        assert world.seconds(i) < 1


@st.composite
def disasters(draw: st.DrawFn) -> World:
    nodes = draw(st.integers(2, 7))
    index = st.integers(1, nodes - 1)
    when = st.integers(0, 800)
    pairs = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    spans = st.tuples(when, st.integers(0, 3000)).map(lambda s: (s[0], s[0] + s[1]))
    return World(
        draw(st.integers(0, 60)),
        [draw(st.sampled_from([1, 2, 4, 40])) for _ in range(nodes)],
        dies=draw(st.dictionaries(index, when, max_size=2)),
        cut=draw(st.dictionaries(pairs, spans, max_size=4)),
        liars=draw(st.frozensets(index, max_size=1)),
        source_loses=draw(st.none() | when),
    )


@settings(max_examples=150)
@given(disasters())
def test_whatever_happens_a_living_node_has_the_bytes_or_an_error(world: World) -> None:
    world.run()
    for node in world.living():
        if node.receiving is not None:
            assert node.receiving.done != bool(node.receiving.failed)
            assert node.receiving.done == (len(node.have) == world.count)


@settings(max_examples=60)
@given(disasters())
def test_a_node_that_can_be_reached_is_served_whatever_the_others_do(world: World) -> None:
    """The source and node 1 are well: node 1 has the version as soon as if it were alone."""
    world.nodes["n1"].dies = None
    world.cut = {pair: span for pair, span in world.cut.items() if set(pair) != {"n0", "n1"}}
    world.source_loses = math.inf
    world.nodes["n0"].ticks = 1
    world.run()
    assert world.whole(1)
    # Others take turns with it, so it may get one part of as many as there are receivers.
    assert world.seconds(1) <= 0.05 + len(world.nodes) * (world.count + 8) * 1.3 / 1000


def test_a_child_that_asks_for_too_much_is_refused_and_others_take_turns() -> None:
    here = State.HERE
    serving = Serving(lambda _version, _index: here)
    assert all(serving.ask("greedy", Ask("1", i), 0.0) for i in range(MAX_ASKS))
    assert not serving.ask("greedy", Ask("1", MAX_ASKS), 0.0)
    assert serving.ask("modest", Ask("1", 0), 0.0)
    turns = [serving.next_chunk(0.0) for _ in range(3)]
    assert [turn.child for turn in turns if turn is not None] == ["greedy", "modest", "greedy"]


def test_asks_of_another_version_are_forgotten() -> None:
    serving = Serving(lambda version, _index: State.HERE if version == "1" else State.COMING)
    serving.ask("child", Ask("1", 0), 0.0)
    serving.ask("child", Ask("2", 0), 0.0)
    assert serving.next_chunk(0.0) is None
    assert serving.kept_waiting(WAITING_SECONDS) == [("child", "2")]
    serving.forget("child")
    assert serving.kept_waiting(9.0) == []


def test_a_receiver_needs_a_parent() -> None:
    with pytest.raises(ValueError, match="at least one parent"):
        Receiving(1, [], TIMING, 0.0)
