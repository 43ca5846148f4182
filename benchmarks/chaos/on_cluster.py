"""Faults of a Ray cluster of several machines, which are namespaces of this one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

from benchmarks.chaos.campaign import kill_one_after_the_other
from benchmarks.chaos.cluster_faults import FAULTS, GENERATORS, restore_nodes
from benchmarks.chaos.cluster_run import ClusterRun
from benchmarks.chaos.findings import Findings
from benchmarks.chaos.live_run import Setup, carry_out
from benchmarks.machines.ray import ray_machines

CLUSTER = {"head": 0, "one": 2, "two": 1, "three": 1}
"""Cores of each machine: room for three processes and one to spare."""
STEPS_ALONE = 400
"""Of the run left alone, which others are compared with as far as it goes."""
SETTINGS = (
    f"launcher.generators={GENERATORS}",
    "launcher.ray.strategy=spread",
    "launcher.ray.max_relay_restarts=1000",
)


def measure_cluster(
    setup: Setup, faults: Mapping[str, int], wanted: int, seed: int
) -> Iterator[Findings]:
    """A run left alone, on this machine without Ray; then a run for each fault."""
    alone = carry_out(setup, "left-alone", STEPS_ALONE).records()
    findings = Findings(wanted, {}, alone)
    own = dataclasses.replace(setup, settings=(*setup.settings, *SETTINGS))
    with ray_machines(CLUSTER, setup.folder / "machines") as cluster:
        make = functools.partial(ClusterRun, cluster=cluster, controller_machine="one")
        for number, (name, kills) in enumerate(faults.items()):
            with_own = dataclasses.replace(own, settings=(*own.settings, *FAULTS[name].settings))
            outcome = kill_one_after_the_other(
                with_own, name, [FAULTS[name]] * kills, seed=seed + number, make=make
            )
            findings.outcomes[name] = outcome
            print(f"{name}: {len(outcome.kills)} of {kills}", outcome.failure or "", flush=True)
            yield findings
            if outcome.failure is None:
                restore_nodes(cluster)
            else:
                cluster.begin_anew()
