"""Receives a broadcast version, chunk by chunk, into the receiver's memory."""

import secrets
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.wire.errors import GroupBroken, WeightsNotReceivedError, WeightsSupersededError
from asyncrl.wire.weights.broadcast.groups import (
    Deadline,
    GlooGroup,
    Group,
    Limits,
    NcclGroup,
    name_of_device,
)
from asyncrl.wire.weights.broadcast.sending import checksum
from asyncrl.wire.weights.broadcast.store import CheckIn, Invitation, Refusal, Visitor
from asyncrl.wire.weights.chunks import Grid
from asyncrl.wire.weights.layout import BroadcastPlace, ControlCode, WeightManifest


class Landing(Protocol):
    """The destination of chunks."""

    def room(self, span: slice, device: torch.device) -> Tensor | None:
        """Return `[bytes]` on this device for these bytes of the file; None: use `put`."""

    def put(self, span: slice, part: Tensor) -> None:
        """Take these bytes of the file, from any device."""


class BroadcastReceiver:
    """A member, which stays in its group between versions. Not thread-safe.

    Chunks arrive on the engine's `device` if all members have GPUs.
    """

    def __init__(self, device: torch.device, limits: Limits | None = None) -> None:
        self._device = device
        self._limits = limits or Limits()
        self._name = secrets.token_hex(8)
        self._asked = 0
        self._visitor: Visitor | None = None
        self._group: Group | None = None
        self._generation = 0
        self._step: Tensor | None = None

    def receive(self, manifest: WeightManifest, place: BroadcastPlace, landing: Landing) -> None:
        """Take part in a broadcast of a version. If it raises, some chunks may have landed.

        A member that breaks off for any reason but an overwritten version leaves its group, whose
        next message it would take for another one. Raises WeightsSupersededError if the version was
        overwritten, WeightsNotReceivedError if it is not broadcast or broke off, and errors of
        `landing` as they are.
        """
        try:
            group, chunk_bytes = self._join(manifest.policy_version, place)
            grid = Grid(manifest.nbytes, chunk_bytes)
            self._receive(group, manifest.policy_version, grid, landing)
        except GroupBroken as error:
            self.leave()
            raise WeightsNotReceivedError(
                f"weights of version {manifest.policy_version} did not arrive by broadcast: {error}"
            ) from error
        except WeightsSupersededError as error:
            raise WeightsSupersededError(
                f"weights of version {manifest.policy_version} {error}"
            ) from error
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the group, if it is in one. Idempotent."""
        if self._group is not None:
            self._group.close()
        self._group, self._visitor, self._generation = None, None, 0

    def _join(self, policy_version: int, place: BroadcastPlace) -> tuple[Group, int]:
        """Check in and join the group of the answer; return it and the size of its chunks."""
        if self._visitor is None or self._visitor.place != place:
            self.leave()
            self._visitor = Visitor(place)
        self._asked += 1
        device = name_of_device(self._device)
        check_in = CheckIn(self._name, self._asked, policy_version, self._generation, device)
        answer = self._visitor.ask(check_in, self._limits.answer)
        if isinstance(answer, Refusal):
            raise GroupBroken(answer.why)
        if self._group is None or answer.generation != self._generation:
            if self._group is not None:
                self._group.close()
            self._group = None
            self._group = self._formed(self._visitor, answer)
            self._generation = answer.generation
        return self._group, answer.chunk_bytes

    def _formed(self, visitor: Visitor, answer: Invitation) -> Group:
        store = visitor.group_store(answer.generation)
        if answer.backend == "nccl":
            return NcclGroup(store, answer.rank, answer.size, self._device, self._limits)
        return GlooGroup(store, answer.rank, answer.size, visitor.host, self._limits)

    def _receive(self, group: Group, version: int, grid: Grid, landing: Landing) -> None:
        said = torch.empty(4, dtype=torch.int64, device=group.device)
        deadline = Deadline(self._limits)
        for index in range(grid.count):
            deadline.check(index, grid.count)
            self._expect(group, said, (ControlCode.CHUNK, version, index))
            span = grid.span(index)
            room = landing.room(span, group.device)
            part = self._step_for(span, group.device) if room is None else room
            group.begin(part)
            group.wait()
            if not torch.equal(checksum(part), said[3:]):
                raise GroupBroken(f"the checksum of chunk {index} is wrong")
            if room is None:
                landing.put(span, part)
        self._expect(group, said, (ControlCode.WHOLE, version, grid.count))

    def _expect(self, group: Group, said: Tensor, expected: tuple[ControlCode, int, int]) -> None:
        group.begin(said)
        group.wait()
        word, version, index = map(int, said[:3].tolist())
        if (version, index) == expected[1:] and word == ControlCode.OVERWRITTEN:
            raise WeightsSupersededError("were overwritten while they were broadcast")
        if (word, version, index) != expected:
            raise GroupBroken(
                f"the sender announced {word} of version {version} before chunk {index} instead of "
                f"{expected[0]:d} of version {expected[1]} before chunk {expected[2]}"
            )

    def _step_for(self, span: slice, device: torch.device) -> Tensor:
        size = span.stop - span.start
        if self._step is None or len(self._step) < size or self._step.device != device:
            self._step = torch.empty(size, dtype=torch.uint8, device=device)
        return self._step[:size]
