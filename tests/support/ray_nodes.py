"""A real Ray cluster of several nodes on this machine, in a process of its own.

with ray_nodes([1, 1, 1]) as cluster:
    cluster.address, cluster.kill_head()
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forked_runs import forking

START_SECONDS = 150.0
_SUPPORT = Path(__file__).parent


@dataclass
class RayNodes:
    """The cluster."""

    process: subprocess.Popen[str]
    address: str
    gcs_pid: int

    def kill_head(self) -> None:
        os.kill(self.gcs_pid, signal.SIGKILL)


@contextlib.contextmanager
def ray_nodes(cpus: Sequence[int]) -> Iterator[RayNodes]:
    """A node for each number of CPUs; the first is the head's."""
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Longer than `head.HEAD_SECONDS`: raylets end their processes then, which save first.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
        "RAY_worker_niceness": "0",  # 15 otherwise, and waiting costs what else runs, too
        "PYTHONPATH": os.pathsep.join([str(_SUPPORT.parents[1]), str(_SUPPORT)]),
    }
    with forking():
        process = subprocess.Popen(
            [sys.executable, "-m", "ray_nodes", *map(str, cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        address, _, pid = process.stdout.readline().strip().partition(" ")
        yield RayNodes(process, address, int(pid))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=40)  # closes its input
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the cluster's processes are of its session
        process.wait()


def main() -> None:
    signal.alarm(2400)  # whatever happens to the tests
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20, "include_log_monitor": False}
    first, *others = map(int, sys.argv[1:])
    head = {"num_cpus": first, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head | small)
    for number in others:
        cluster.add_node(num_cpus=number, wait=False, **small)
    cluster.wait_for_nodes(timeout=START_SECONDS)
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    print(cluster.address, gcs, file=output, flush=True)
    sys.stdin.read()
    began = time.monotonic()
    for node in [*cluster.worker_nodes, cluster.head_node]:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
    print(f"ended in {time.monotonic() - began:.1f} s", file=sys.stderr)
    os._exit(0)


if __name__ == "__main__":
    main()
