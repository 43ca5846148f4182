"""Ends what a child of a node leaves behind: `python -m asyncrl.launch.orphan_reaper ...`.

An agent can be killed at any moment, by Ray or with its node's processes. Its child then gets
SIGTERM from the kernel. But a child that hangs does not end, and engines and reward workers are its
children, not the agent's. So each child has a keeper, which is a child of neither the agent nor the
child. It sleeps until one of the two ends, then

- gives the child some seconds to end on its own,
- kills it, its session, and every process that has the child's mark in its environment,
- removes the child's files in memory, and those of the run if no process of it is left here: none
  in /proc, and no other keeper.

Arguments: process ids of agent and child, mark of the child, mark of the run, folder of files in
memory, the run's id, name of the child, seconds for it to end.
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

from asyncrl.launch.identity import pidfd_of, send, session_members, with_variable
from asyncrl.launch.records import MARK_VARIABLE as RUN_MARK

MARK_VARIABLE = "ASYNCRL_PROCESS_MARK"
"""Environment variable of a child and of all that it starts, by which its keeper finds them."""
KILL_SECONDS = 10.0
_POLL_SECONDS = 0.05


def main() -> None:
    """Leave the starting process, then wait."""
    agent, child = int(sys.argv[1]), int(sys.argv[2])
    mark, run_mark, folder, run_id, name = sys.argv[3:8]
    agent_end, child_end = pidfd_of(agent), pidfd_of(child)
    if keeper := os.fork():
        print(keeper, flush=True)  # for the agent, which starts another when this one ends
        os._exit(0)  # so that it is not a child of the agent, which may be killed with its children
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    kept = Path(folder) / f"asyncrl-{run_id}-kept"
    descriptor = share(kept)
    keep(agent_end, child_end, child, mark, grace=float(sys.argv[8]))
    remove(Path(folder), f"asyncrl-{run_id}-{name}-weights-*")
    if not any(with_variable(RUN_MARK, {run_mark})) and is_last(descriptor):
        remove(Path(folder), f"asyncrl-{run_id}-*")


def share(path: Path) -> int | None:
    """Open this file with a shared lock for as long as the keeper lives.

    Containers may share memory without seeing each other's processes, so each keeper takes this
    lock. Return None if that fails; then `is_last` is never sure.
    """
    with contextlib.suppress(OSError):
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)  # the last keeper has removed it
    return None


def is_last(descriptor: int | None) -> bool:
    """Return True if no other keeper has a process of the run here. The lock excludes new ones."""
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove(folder: Path, pattern: str) -> None:
    """Remove files and folders of this name."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def keep(agent_end: int | None, child_end: int | None, child: int, mark: str, grace: float) -> None:
    """Wait for the end of agent or child, then end the rest.

    Each of the two descriptors is readable when its process has ended, and None if it had before.
    `child` leads its session. It has `grace` seconds to end on its own.
    """
    waiting = [one for one in (agent_end, child_end) if one is not None]
    if len(waiting) == 2:
        select.select(waiting, [], [])
    if child_end is not None and not select.select([child_end], [], [], 0)[0]:
        signal.pidfd_send_signal(child_end, signal.SIGTERM)
        signal.pidfd_send_signal(child_end, signal.SIGCONT)  # a stopped one acts only then
        select.select([child_end], [], [], grace)
    began = time.monotonic()
    while time.monotonic() - began < KILL_SECONDS:
        left = [*with_variable(MARK_VARIABLE, {mark}), *session_members({child})]
        for process in left:
            send(process, signal.SIGKILL)
        if not left:
            return
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
