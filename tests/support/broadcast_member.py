"""A process that receives broadcasts: a line of JSON in, a line of JSON out.

In: `{"manifest": WeightManifest, "die_at": null | k}`; with a number it kills itself before its
k-th chunk. Out: `{"version": v, "digest": whole fingerprint, "warnings": [...]}`. It waits very
long for a chunk: it must hear of another one's death.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

import msgspec
import torch

from asyncrl.wire.weights.broadcast.groups import Limits
from asyncrl.wire.weights.broadcast.receiving import BroadcastReceiver
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer, _Landing


class Command(msgspec.Struct):
    manifest: WeightManifest
    die_at: int | None = None


class Report(msgspec.Struct):
    version: int
    digest: str
    warnings: list[str]


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _die_at(chunk: int) -> None:
    room, seen = _Landing.room, 0

    def counted(self: _Landing, *arguments: Any) -> torch.Tensor | None:
        nonlocal seen
        seen += 1
        if seen > chunk:
            os.kill(os.getpid(), signal.SIGKILL)
        return room(self, *arguments)

    _Landing.room = counted  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    buffer, kept = WeightBuffer(), _Kept()
    buffer._receiver = BroadcastReceiver(torch.device("cpu"), Limits(chunk=600.0))
    logging.getLogger("asyncrl.wire").addHandler(kept)
    print("ready", flush=True)
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        if command.die_at is not None:
            _die_at(command.die_at)
        kept.messages.clear()
        buffer.read(command.manifest)
        digest = fingerprint(buffer.tensors()).whole
        report = Report(command.manifest.policy_version, digest, kept.messages)
        print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    main()
