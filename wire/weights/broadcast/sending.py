"""Broadcasts the versions in the trainer's files, in a thread of the trainer's process.

Each chunk has a checksum, computed on its device, at some gigabytes a second on a CPU. Engines
compare the fingerprint of all weights after each installation. But one with packed copies can
compare only some columns (`asyncrl.wire.weights.fingerprint`), and NCCL checks nothing.
"""

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from asyncrl.wire.errors import GroupBroken, WeightsReadError
from asyncrl.wire.weights.broadcast.groups import (
    Backend,
    Deadline,
    GlooGroup,
    Group,
    Limits,
    NcclGroup,
    backend_of,
    name_of_device,
)
from asyncrl.wire.weights.broadcast.store import (
    BroadcastMeeting,
    BroadcastStore,
    CheckIn,
    Invitation,
    Refusal,
)
from asyncrl.wire.weights.chunks import Grid
from asyncrl.wire.weights.files import check_version, fill, held_version
from asyncrl.wire.weights.fingerprint import pseudo_random
from asyncrl.wire.weights.layout import ControlCode, Outcome, WeightManifest

_BLOCK = 1 << 15
"""64-bit words; this many numbers stay in a core's cache."""


@torch.no_grad()
def checksum(part: Tensor) -> Tensor:
    """Return the checksum, `[1]` int64, of `[n]` bytes, n a multiple of 8.

    It is the sum of all words times odd pseudo-random numbers, modulo 2**64, so that one changed
    word is found.
    """
    words = part.view(torch.int64)
    numbers = pseudo_random(0, _BLOCK, part.device) | 1
    sums = (_by_dot if part.device.type == "cpu" else _by_product)(words, numbers)
    odd = 2 * torch.arange(len(sums), device=part.device) + 1
    return (sums * odd).sum(0, keepdim=True)


def _by_dot(words: Tensor, numbers: Tensor) -> Tensor:
    """Return `[blocks]` sums, without memory for products."""
    return torch.stack([torch.dot(one, numbers[: len(one)]) for one in words.split(_BLOCK)])


def _by_product(words: Tensor, numbers: Tensor) -> Tensor:
    """Return `[blocks]` sums where torch lacks a dot product of integers."""
    whole = len(words) // _BLOCK * _BLOCK
    sums = (words[:whole].view(-1, _BLOCK) * numbers).sum(1)
    rest = words[whole:]
    if not len(rest):
        return sums
    return torch.cat([sums, (rest * numbers[: len(rest)]).sum(0, keepdim=True)])


logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 25

_POLL_SECONDS = 0.01
_TRIES = 2
"""Consecutive failures to form a group of NCCL, each of `Limits.form`, before giving up."""
_CPU = torch.device("cpu")


class WeightSender:
    """Serves until it is closed. The trainer only calls `publish`.

    It listens at `host`, an address of this machine, without keys. The first version is for
    `members` members. NCCL sends from `device`, the trainer's. `note` is called with each
    broadcast's outcome, in the thread. `chunk_bytes` is a multiple of 64. Raises OSError if the
    address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        *,
        members: int,
        device: torch.device = _CPU,
        limits: Limits | None = None,
        note: Callable[[Outcome], None] = lambda _outcome: None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._limits = limits or Limits()
        self._device = device
        self._note = note
        self._chunk_bytes = chunk_bytes
        self._desk = BroadcastStore(host, 2 * self._limits.answer)
        self._meeting = BroadcastMeeting(self._limits.window, members)
        self._newest: WeightManifest | None = None
        self._group: Group | None = None
        self._ranks: dict[str, int] = {}
        self._generation = 0
        self._unformed = 0
        """Consecutive failures to form a group of NCCL."""
        self._broken = False
        self._steps: list[Tensor] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-broadcast", daemon=True)
        self._thread.start()

    def publish(self, manifest: WeightManifest) -> WeightManifest:
        """Offer a published version in place of the previous one; return the manifest to send."""
        self._newest = manifest
        return msgspec.structs.replace(manifest, broadcast=self._desk.place)

    def close(self) -> None:
        """Stop and wait for the thread; a stuck one ends with the process. Idempotent."""
        self._closing.set()
        seconds = self._limits.form + 2 * self._limits.chunk
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning("the thread that broadcasts weights did not end in %g s", seconds)

    def _run(self) -> None:
        try:
            while not self._closing.wait(_POLL_SECONDS):
                self._turn(time.monotonic())
        except Exception:
            logger.exception(
                "weights are no longer broadcast; generators read the published file instead"
            )
        finally:
            self._close_group()
            self._desk.close()

    def _turn(self, now: float) -> None:
        for check_in in self._desk.arrivals():
            if self._unformed < _TRIES:
                self._meeting.arrive(check_in, now)
            else:
                self._desk.answer(check_in, Refusal("NCCL did not connect the members"))
        newest = self._newest
        if newest is None:
            return
        version = newest.policy_version
        for one in self._meeting.turn_away(version):
            self._desk.answer(one, Refusal(f"the newest is version {version}"))
        members = self._meeting.take(now)
        if members:
            self._broadcast(newest, members)

    def _broadcast(self, manifest: WeightManifest, members: list[CheckIn]) -> None:
        began = time.monotonic()
        outcome: Outcome = "broken"
        try:
            group = self._group_of(members)
            if self._send(group, manifest):
                outcome = "whole"
                self._meeting.served(members)
                self._broken = False
            else:
                outcome = "overwritten"
        except GroupBroken as error:
            self._close_group()
            self._meeting.broke(members)
            logger.log(
                logging.INFO if self._broken else logging.WARNING,
                "the broadcast of version %d to %d engine processes broke off, and they read the "
                "published file instead, %.1f s later than without broadcasts: %s. Until one "
                "arrives whole, the next ones are logged at INFO",
                manifest.policy_version,
                len(members),
                time.monotonic() - began,
                error,
            )
            self._broken = True
            if self._unformed == _TRIES:
                logger.warning(
                    "NCCL could not connect the members %d times in a row: no version is "
                    "broadcast any more, and generators read the published file. Set "
                    "launcher.weights: files to do so from the start, or NCCL_DEBUG=INFO to log "
                    "NCCL's reason",
                    _TRIES,
                )
        finally:
            self._note(outcome)
        text = "version %d, %d bytes, broadcast to %d engine processes in %.2f s: %s"
        seconds = time.monotonic() - began
        version, nbytes = manifest.policy_version, manifest.nbytes
        logger.info(text, version, nbytes, len(members), seconds, outcome)

    def _group_of(self, members: list[CheckIn]) -> Group:
        """Return the group of these members, the present one if possible. Raises GroupBroken."""
        stays = {one.member for one in members} == self._ranks.keys() and all(
            one.generation == self._generation for one in members
        )
        own = name_of_device(self._device)
        backend = backend_of([own, *(one.device for one in members)])
        if not stays or self._group is None:
            self._close_group()
            self._generation += 1
            self._ranks = {one.member: rank for rank, one in enumerate(members, start=1)}
        size = len(members) + 1
        for one in members:
            rank = self._ranks[one.member]
            invitation = Invitation(self._generation, rank, size, backend, self._chunk_bytes)
            self._desk.answer(one, invitation)
        if self._group is None:
            self._group = self._formed(size, backend)
            self._desk.forget_groups_before(self._generation)
        return self._group

    def _formed(self, size: int, backend: Backend) -> Group:
        store = self._desk.group_store(self._generation)
        if backend == "gloo":
            return GlooGroup(store, 0, size, self._desk.place.host, self._limits)
        self._unformed += 1
        group = NcclGroup(store, 0, size, self._device, self._limits)
        self._unformed = 0
        return group

    def _send(self, group: Group, manifest: WeightManifest) -> bool:
        """Send a version; False if it was overwritten during that. Raises GroupBroken."""
        grid = Grid(manifest.nbytes, self._chunk_bytes)
        version, deadline = manifest.policy_version, Deadline(self._limits)
        last, index = ControlCode.WHOLE, 0
        try:
            with held_version(manifest) as descriptor:
                for index in range(grid.count):
                    group.wait(left=2)  # the last chunk and its message; the memory before is free
                    deadline.check(index, grid.count)
                    span = grid.span(index)
                    part = self._step(index % 2)[: span.stop - span.start]
                    fill(part.numpy().data, descriptor, span.start)
                    check_version(descriptor, manifest)
                    own = part.to(group.device)
                    group.begin(_said(ControlCode.CHUNK, version, index, checksum(own)))
                    group.begin(own)
                index = grid.count
        except WeightsReadError as error:
            logger.info("the broadcast of version %d ends early: %s", version, error)
            last = ControlCode.OVERWRITTEN
        nothing = torch.zeros(1, dtype=torch.int64, device=group.device)
        group.begin(_said(last, version, index, nothing))
        group.wait()
        return last is ControlCode.WHOLE

    def _step(self, turn: int) -> Tensor:
        """Return one of two pieces of host memory for a chunk, page-locked for a GPU."""
        if not self._steps:
            pinned = self._device.type == "cuda"
            self._steps = [
                torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pinned)
                for _ in range(2)
            ]
        return self._steps[turn]

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
        self._ranks = {}


def _said(word: ControlCode, policy_version: int, index: int, checksum_of_chunk: Tensor) -> Tensor:
    said = torch.tensor([word, policy_version, index], device=checksum_of_chunk.device)
    return torch.cat([said, checksum_of_chunk])
