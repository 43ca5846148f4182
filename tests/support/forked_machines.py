"""Processes on machines made of namespaces, forked as those of `forked_runs`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO
from unittest import mock

from forked_runs import MACHINE, Popen

from benchmarks.machines.namespaces import Machine

_start = Machine.start


@contextlib.contextmanager
def forking_on_machines() -> Iterator[None]:
    """Fork what is `forked_runs.FORKED`, and Ray's workers, unless it may use a GPU."""
    import torch

    start = _start if torch.cuda.is_available() else _fork
    with mock.patch.object(Machine, "start", start):
        yield


def _fork(
    machine: Machine,
    command: Sequence[str],
    *,
    output: IO[bytes] | int = subprocess.DEVNULL,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    if command[0] != sys.executable or command[1] != "-m":
        return _start(machine, command, output=output, variables=variables)
    there = {MACHINE: str(machine.first)}
    return Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=machine.environment(variables) | there,
    )
