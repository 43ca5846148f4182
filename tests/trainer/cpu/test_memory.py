"""A trainer on a CPU is given the memory of freed tensors again."""

from __future__ import annotations

import subprocess
import sys

_GROWN = """
import sys, torch
from pathlib import Path
from asyncrl.trainer.model.memory_estimate import keep_freed_memory
def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
if sys.argv[1] == "kept":
    assert keep_freed_memory()
before = held()
tensors = [torch.ones(1 << 24) for _ in range(4)]
del tensors
print(held() - before)
"""


def test_freed_memory_stays_with_the_process() -> None:
    """Of four tensors of 64 MiB; in KiB of address space, which no pressure on memory changes."""
    grown = {}
    for way in ("kept", "given back"):
        done = subprocess.run(
            [sys.executable, "-c", _GROWN, way], capture_output=True, text=True, check=True
        )
        grown[way] = int(done.stdout.splitlines()[-1])
    assert grown["given back"] < 64 * 1024
    assert grown["kept"] > 250 * 1024
