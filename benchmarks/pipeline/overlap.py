"""How much two busy processes slow each other down on this machine.

    python -m benchmarks.pipeline.overlap      prints the factor

Two processes, each pinned to a core and multiplying matrices in one thread, are timed alone and at
the same time, in turns. Cores that share execution units, caches or a power budget are not two: if
each process takes f times as long next to the other, work that keeps both busy for G and T seconds
alone takes at least (G + T) f / 2 seconds when it overlaps completely, and not max(G, T).
"""

import os
import statistics
import subprocess
import sys
import time

from asyncrl.cores import stay_on

_TURNS = 5
_SIZE = 384


def measure_slowdown(seconds: float = 0.5) -> float:
    """Seconds of a product next to a busy process over those alone; at least 1 but for noise."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("two processes need two cores; this process may use one")
    children = [_start(core) for core in (cores[0], cores[-1])]
    try:
        for child in children:
            _rates([child], seconds)  # warms up
        ratios = []
        for _ in range(_TURNS):
            alone = sum(_rates([child], seconds)[0] for child in children)
            ratios.append(alone / sum(_rates(children, seconds)))
        return statistics.median(ratios)
    finally:
        for child in children:
            child.kill()
            child.communicate()


def bound(slowdown: float, synchronous: float, generation: float, training: float) -> float:
    """Most that overlapping can gain over a synchronous step on such cores."""
    overlapped = max(generation, training, (generation + training) * slowdown / 2)
    return synchronous / overlapped


def _start(core: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.pipeline.overlap", "--on", str(core)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


def _rates(children: list[subprocess.Popen[str]], seconds: float) -> list[float]:
    """Products per second of children that work at the same time."""
    for child in children:
        if child.stdin is not None:
            print(seconds, file=child.stdin, flush=True)
    found = []
    for child in children:
        line = child.stdout.readline() if child.stdout is not None else ""
        if not line:
            raise RuntimeError(f"measuring the cores failed with exit code {child.wait()}")
        found.append(float(line))
    return found


def _work(core: int) -> None:
    """For every line of seconds: multiply for so long and print the products per second."""
    stay_on([core])
    import torch

    torch.set_num_threads(1)
    left, right = torch.randn(2, _SIZE, _SIZE)
    for line in sys.stdin:
        began, products = time.perf_counter(), 0
        while time.perf_counter() - began < float(line):
            torch.mm(left, right)
            products += 1
        print(products / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on"]:
        _work(int(sys.argv[2]))
    else:
        print(f"{measure_slowdown():.2f}")
