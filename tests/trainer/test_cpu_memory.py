"""A trainer on a CPU is given the memory of freed tensors again."""

from __future__ import annotations

import subprocess
import sys

_FAULTS = """
import resource, sys, torch
from trainer.cpu_memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for turn in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_used_again_without_asking_the_system() -> None:
    """Four tensors of 64 MiB, one after the other: as many pages are touched as are cleared."""
    faults = {}
    for way in ("kept", "given back"):
        done = subprocess.run(
            [sys.executable, "-c", _FAULTS, way], capture_output=True, text=True, check=True
        )
        faults[way] = int(done.stdout.splitlines()[-1])
    assert faults["given back"] > 16 * faults["kept"] + 100
