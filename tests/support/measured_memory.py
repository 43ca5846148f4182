"""The memory that a process takes: `python -m measured_memory CASE ...`, a line for each case.

    draw ROWS MIB TOP_P     KiB by which the peak grows where rows of logits of Qwen3 are drawn from
    score ROWS MIB TOP_P    or processed, with at most so many MiB at once
    kept, given back        KiB of address space that four freed tensors of 64 MiB leave, with what
                            a trainer does about it and without

Each is measured in a fork of a process that has imported everything.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from forked_runs import forking

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sampling.drawing import Streams, warm_up
from asyncrl.engine.sampling.logits import draw_from_logits, process_all
from asyncrl.engine.sampling.truncation import SamplingColumns
from asyncrl.trainer.model.memory_estimate import keep_freed_memory

VOCABULARY = 151_936


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


_M_MMAP_THRESHOLD = -3


def _give_blocks_back() -> None:
    """Let each large block be mapped alone and given back when it is freed.

    Otherwise the peak depends on holes in the heap that the process was forked with: 42, 62 or 104
    MiB where 62 are held.
    """
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)


def grown(what: str, rows: int, mib: int, top_p: float) -> int:
    """KiB by which the peak grows."""
    _give_blocks_back()
    dtype = torch.bfloat16 if what == "draw" else torch.float32
    base = torch.randn(64, VOCABULARY).to(dtype) * 3  # held: the peak has it
    logits = base.repeat(rows // 64, 1)
    sampling = SamplingColumns.of([SamplingParams(1, temperature=0.8, top_p=top_p)] * rows)
    numbers = np.arange(rows)
    streams = Streams(numbers.astype(np.uint64), numbers, numbers.astype(np.uint64))

    def work(first: int, limit: int) -> object:
        some, part = sampling.at(numbers[:first]), streams.part(slice(0, first))
        if what == "draw":
            return draw_from_logits(logits[:first], some, 64, part, max_bytes=limit)
        return process_all(logits[:first], some, limit)

    work(1, 1)  # code, threads and small buffers are there before it is measured
    before = _peak()
    work(rows, mib << 20)
    return _peak() - before


def left_by_freed_tensors(keeps: bool) -> int:
    """KiB of address space, which no pressure on memory changes."""

    def held() -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))

    if keeps:
        assert keep_freed_memory()
    before = held()
    tensors = [torch.ones(1 << 24) for _ in range(4)]
    del tensors
    return held() - before


def measured(*cases: str) -> list[float]:
    """MiB, in the order of the cases."""
    with forking():
        done = subprocess.run(
            [sys.executable, "-m", "measured_memory", *cases],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    return [int(line) / 1024 for line in done.stdout.split()]


def main() -> None:
    """Measure each case."""
    torch.set_num_threads(1)
    for case in sys.argv[1:]:
        sys.stdout.flush()
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0, case
            continue
        if case in ("kept", "given back"):
            print(left_by_freed_tensors(case == "kept"))
            return
        warm_up()
        what, rows, mib, top_p = case.split()
        print(grown(what, int(rows), int(mib), float(top_p)))
        return


if __name__ == "__main__":
    main()
