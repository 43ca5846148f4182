"""Names of the processes of a trainer: `trainer` is rank 0, then come `trainer-1`, `trainer-2`, ...

A trainer that replaces a lost one has its number behind a dot, in all of its names.

    >>> trainer_name(0, 0), trainer_name(1, 0), trainer_name(0, 2), trainer_name(1, 2)
    ('trainer', 'trainer-1', 'trainer.2', 'trainer-1.2')
    >>> [rank_of(name) for name in ("trainer", "trainer-1", "trainer.2", "trainer-1.2")]
    [0, 1, 0, 1]
"""

from __future__ import annotations


def trainer_name(rank: int, lineage: int) -> str:
    """The name of a rank's process; `lineage` trainers were lost before this one."""
    base = f"trainer-{rank}" if rank else "trainer"
    return f"{base}.{lineage}" if lineage else base


def rank_of(name: str) -> int:
    """The rank of a trainer's process."""
    return int(name.split(".")[0].removeprefix("trainer").removeprefix("-") or 0)
