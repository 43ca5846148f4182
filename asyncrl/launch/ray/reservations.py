"""Placement groups of generators that join a run on Ray: asked for, waited for, given back.

The processes that a run begins with share one group. Ray cannot give back a part of a group, so a
joiner has one of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.launch.ray.nodes import Slot, shortage, without_missing_gpus


@dataclass(slots=True)
class _Room:
    slot: Slot
    group: PlacementGroup
    until: float | None
    """When waiting for it ends (monotonic seconds); None: it is there."""
    seconds: float


class Rooms:
    """The groups of joiners, by slot."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}

    def __contains__(self, index: int) -> bool:
        """Whether a joiner's slot was asked for and not given back."""
        return index in self._rooms

    def slot(self, index: int) -> Slot:
        """What it takes of its node."""
        return self._rooms[index].slot

    def ask(self, index: int, slot: Slot, seconds: float) -> str | None:
        """Ask Ray for a slot; why it can never be given, if that is known at once."""
        (slot,) = without_missing_gpus((slot,), ray.cluster_resources())
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        reason = shortage((slot,), nodes, "pack")
        if reason is None:
            group = placement_group([slot.bundle()], strategy="PACK")
            self._rooms[index] = _Room(slot, group, time.monotonic() + seconds, seconds)
        return reason

    def settled(self) -> list[tuple[int, str]]:
        """(slot, why not) of what was decided since the last call; empty: there is room."""
        found = []
        for index, room in list(self._rooms.items()):
            if room.until is None:
                continue
            if placement_group_table(room.group).get("state") == "CREATED":
                room.until = None
                found.append((index, ""))
            elif time.monotonic() > room.until:
                self.give_back(index)
                found.append((index, _no_room(room)))
        return found

    def place(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Where its actor is."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self._rooms[index].group, placement_group_bundle_index=0
        )

    def give_back(self, index: int) -> None:
        """Ray may give it to others; an actor in it is killed."""
        remove_placement_group(self._rooms.pop(index).group)

    def close(self) -> None:
        """Give everything back."""
        for index in list(self._rooms):
            self.give_back(index)


def _no_room(room: _Room) -> str:
    free = ", ".join(
        f"{key} {value:g}"
        for key, value in sorted(ray.available_resources().items())
        if key in ("CPU", "GPU")
    )
    return (
        f"{room.slot.name} would need {room.slot.bundle()}, and the Ray cluster did not give it "
        f"within {room.seconds:g} s; free are {free or 'nothing'}. Add a node (`ray start "
        "--address=HOST:PORT`) and order it again"
    )
