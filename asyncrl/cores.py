"""Cores of each process of a run with `launcher.pin_cores`, and names of trainer processes.

    cores       0 .. t-1       t .. 2t-1      2t .. 3t-1     3t ..
    process     generator-0    generator-1    trainer        controller and reward workers

Each process has t threads; each rank of a trainer is a process. If no core is left, the controller
and the reward workers share the trainer's cores. Their work is short (some milliseconds per
sample), and delays the trainer by that much, whereas a delayed generator delays every row of its
step.

The processes of a trainer are `trainer` (rank 0), `trainer-1`, `trainer-2`, ...; the lineage of a
trainer that replaces a lost one follows a dot:

    >>> trainer_name(0, 0), trainer_name(1, 0), trainer_name(0, 2), trainer_name(1, 2)
    ('trainer', 'trainer-1', 'trainer.2', 'trainer-1.2')
    >>> [rank_of(name) for name in ("trainer", "trainer-1", "trainer.2", "trainer-1.2")]
    [0, 1, 0, 1]
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import UserError


def trainer_name(rank: int, lineage: int) -> str:
    """Return the name of a rank's process; `lineage` trainers were lost before this one."""
    base = f"trainer-{rank}" if rank else "trainer"
    return f"{base}.{lineage}" if lineage else base


def rank_of(name: str) -> int:
    """Return the rank of a trainer's process."""
    return int(name.split(".")[0].removeprefix("trainer").removeprefix("-") or 0)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: by its affinity, and by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min(cores or 1, *_quotas(root), float("inf"))))


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield this process's control group and those around it; True for those of version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        if controllers and not top.is_dir():  # mounted alone
            top = top.with_name(controller)
        group = Path(os.path.normpath(f"{top}/{place.lstrip('/')}"))
        # A name space may show a path that leads out of what is mounted here.
        inside = [one for one in (group, *group.parents) if one.is_relative_to(top)]
        yield from ((one, not controllers) for one in inside or [top])


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of this process's control groups, in cores."""
    for group, is_v2 in control_groups("cpu", root):
        with contextlib.suppress(OSError, ValueError):
            if is_v2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota = (group / "cpu.cfs_quota_us").read_text()
                period = (group / "cpu.cfs_period_us").read_text()
            if quota.strip() != "max" and int(quota) > 0:
                yield int(quota) / int(period)


HELPER_CORES = "ASYNCRL_HELPER_CORES"
"""Environment variable with the cores of a process's reward workers, such as `1` or `2,3`."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores by role. Generators and trainer do not share cores."""

    generators: tuple[tuple[int, ...], ...]
    trainer: tuple[int, ...]
    """Cores of all its ranks, side by side."""
    helpers: tuple[int, ...]
    """Cores of the controller and the reward workers: the remaining ones, or else the trainer's."""
    ranks: int = 1

    def of(self, name: str) -> tuple[int, ...]:
        """Return a process's cores; a replacement (`generator-0.1`) has its predecessor's."""
        if not name.startswith("generator-"):
            size = len(self.trainer) // self.ranks
            return self.trainer[rank_of(name) * size :][:size]
        return self.generators[int(name.removeprefix("generator-").split(".")[0])]


def divide_machine(
    *, generators: int, threads: int | None, pin_cores: bool, ranks: int = 1
) -> tuple[int, CorePlan | None]:
    """Return the threads of each process of a run, and the cores with `pin_cores`.

    A trainer of `ranks` processes is added to the generators. By default each process has an even
    share of the usable cores. Raises UserError if the system cannot pin, or has too few cores.
    """
    can_pin = hasattr(os, "sched_getaffinity")
    available = sorted(os.sched_getaffinity(0)) if can_pin else [0, 1]
    threads = threads or max(1, usable_cores() // (generators + ranks))
    if not pin_cores:
        return threads, None
    if not can_pin:
        raise UserError("launcher.pin_cores: this system cannot pin processes; leave pin_cores out")
    return threads, plan_cores(available, generators=generators, threads=threads, ranks=ranks)


def plan_cores(available: Sequence[int], generators: int, threads: int, ranks: int = 1) -> CorePlan:
    """Give each generator and each trainer rank separate cores. Raises UserError if too few."""
    needed = (generators + ranks) * threads
    if needed > len(available):
        trainer = "a trainer" if ranks == 1 else f"a trainer of {ranks} ranks"
        raise UserError(
            f"launcher.pin_cores: {generators} generator(s) and {trainer} with {threads} "
            f"thread(s) each need {needed} cores, and this process may use {len(available)}. Lower "
            "launcher.threads or launcher.generators, or leave pin_cores out"
        )
    cores = sorted(available)
    blocks = [tuple(cores[i * threads : (i + 1) * threads]) for i in range(generators)]
    of_trainer = tuple(cores[generators * threads : needed])
    return CorePlan(tuple(blocks), of_trainer, tuple(cores[needed:]) or of_trainer, ranks)


def stay_on(cores: Sequence[int], pid: int = 0) -> None:
    """Pin every thread of a process to these cores; threads that it starts later inherit this."""
    for thread in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def stay_on_helper_cores() -> None:
    """Pin this process to the cores in HELPER_CORES, if that is set. Reward workers call it."""
    if cores := os.environ.get(HELPER_CORES):
        stay_on([int(core) for core in cores.split(",")])
