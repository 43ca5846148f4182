"""What happens to a run on a Ray cluster."""

import contextlib
import dataclasses
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.chaos.campaign import kill_one_after_the_other
from benchmarks.chaos.cluster_run import Child, ClusterRun
from benchmarks.chaos.findings import Findings
from benchmarks.chaos.live_run import LiveRun, Setup, carry_out
from benchmarks.machines.namespaces import NETWORK
from benchmarks.machines.ray import RayMachines, ray_machines

CLUSTER = {"head": 0, "one": 2, "two": 1, "three": 1}
"""Cores of each machine: room for three processes and one to spare."""
GENERATORS = 2
"""Of each run on a cluster whose trainer has one rank."""
RANKS_APART = (
    *("trainer.ranks=2", "launcher.ray.trainer.resources={each: 1}"),
    *(f"trainer.rank_network={NETWORK}0/24", "launcher.trusted_network=true"),
)
"""Settings of a run whose trainer has two ranks on two machines."""
_ONE_GENERATOR = ("launcher.generators=1", "launcher.ray.generator.resources={one: 1}")
"""On the controller's machine, which has two cores: so one is left there and one on the third
machine, and a rank whose machine is lost finds another one that has no rank."""
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


_HEAD_LOST = "has not answered for"
_NODE_LOST = "this machine's node has left the Ray cluster"
_DRIVER_LOST = "the Ray driver ended"


@dataclass(frozen=True)
class ClusterFault:
    """A fault of a cluster; see `Fault`."""

    name: str
    about: str
    happens: Callable[[ClusterRun, random.Random], Sequence[Child] | None]
    """Returns the processes of the run that have to end in consequence."""
    repaired_by: Callable[[ClusterRun], None] | None = None
    ends_the_run: bool = False
    expected_error: str | None = None
    ranks: int = 1
    """Of the trainer of the run, each on a machine of its own. With two there is one generator."""

    @property
    def settings(self) -> tuple[str, ...]:
        return () if self.ranks == 1 else (*RANKS_APART, *_ONE_GENERATOR)

    def is_possible(self, run: LiveRun) -> bool:
        """Whether all processes of the run are there."""
        run = _of_cluster(run)
        generators = GENERATORS if self.ranks == 1 else 1
        wanted = {"trainer": self.ranks, "generator": generators, "relay": 1}
        return all(len(run.on(role)) >= number for role, number in wanted.items())

    def strike(self, run: LiveRun, moments: random.Random) -> None:
        """Have it happen, and wait for the end of what it ends: until then nothing is late."""
        run = _of_cluster(run)
        ending = {one.pid for one in self.happens(run, moments) or ()}
        run.until(lambda: not ending & {one.pid for one in run.on()}, "the end of what was killed")

    def repair(self, run: LiveRun) -> None:
        """Give the cluster back what the fault has taken."""
        if self.repaired_by is not None:
            self.repaired_by(_of_cluster(run))


def _of_cluster(run: LiveRun) -> ClusterRun:
    if not isinstance(run, ClusterRun):
        raise TypeError(f"{run.name} is not on a cluster")
    return run


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _elsewhere(run: ClusterRun) -> list[Child]:
    """Processes that are neither on the controller's machine nor on the head's."""
    kept = run.controller_machine, run.nodes.head
    return [one for one in run.on() if one.machine.name not in kept]


def _child(role: str) -> Callable[[ClusterRun, random.Random], Sequence[Child]]:
    def happens(run: ClusterRun, moments: random.Random) -> Sequence[Child]:
        child = moments.choice(run.on(role))
        _kill(child.pid)
        return [child]

    return happens


def _rank(run: ClusterRun, moments: random.Random) -> Sequence[Child]:
    ranks = run.on("trainer")
    _kill(moments.choice(ranks).pid)
    return ranks


def _machine_of_a_rank(run: ClusterRun, moments: random.Random) -> Sequence[Child]:
    """Not the controller's; the other ranks end, too."""
    ranks = run.on("trainer")
    others = [one for one in ranks if one.machine.name != run.controller_machine]
    moments.choice(others).machine.power_off()
    return ranks


def _worker(run: ClusterRun, moments: random.Random) -> Sequence[Child]:
    child = moments.choice(run.on())
    _kill(child.worker)
    return [child]


def _agent(run: ClusterRun, moments: random.Random) -> Sequence[Child]:
    child = moments.choice(run.on())
    _kill(child.agent)
    return [child]


def _keeper(run: ClusterRun, moments: random.Random) -> None:
    """And see that there is another one soon."""
    keepers = run.keepers()
    victim = moments.choice(keepers)
    _kill(victim)
    run.until(
        lambda: victim not in (now := run.keepers()) and len(now) >= len(keepers), "another keeper"
    )


def _raylet(run: ClusterRun, moments: random.Random) -> Sequence[Child]:
    machine = moments.choice(_elsewhere(run)).machine
    _kill(run.nodes.raylet(machine.name))
    return [one for one in run.on() if one.machine is machine]


SHORT_SECONDS = 8.0
"""A cut that nobody takes for a loss: less than `launcher.silence_seconds` and than what Ray's head
waits for a node (about 20 s)."""
END_SECONDS = 120.0
"""For the processes of a machine that was cut off to end by themselves when they are back."""


def _machine(run: ClusterRun, moments: random.Random) -> None:
    moments.choice(_elsewhere(run)).machine.power_off()


def _cut_for_a_moment(run: ClusterRun, moments: random.Random) -> None:
    before = {one.name for one in run.on()}
    machine = moments.choice(_elsewhere(run)).machine
    machine.cut()
    time.sleep(SHORT_SECONDS)
    machine.heal()
    healed = time.time()
    run.until(lambda: run.last_step_at() > healed, "a step after a short cut")
    if (after := {one.name for one in run.on()}) != before:
        raise run.error(f"replaced {before - after} by {after - before} after {SHORT_SECONDS:g} s")


def _cut(run: ClusterRun, moments: random.Random) -> None:
    """For as long as the run needs to recover without the machine."""
    machine = moments.choice(_elsewhere(run)).machine
    run.cut_off = [one for one in run.on() if one.machine is machine]
    machine.cut()


def _heal(run: ClusterRun) -> None:
    """The replaced processes on the machine that was cut off are to end by themselves."""
    for name in {one.machine.name for one in run.cut_off}:
        run.nodes.machines[name].heal()
    old = {one.pid for one in run.cut_off}
    until = time.monotonic() + END_SECONDS
    while left := old & {one.pid for one in run.on()}:
        if time.monotonic() > until:
            raise run.error(f"left {len(left)} replaced processes running where it was cut off")
        time.sleep(0.2)
    run.cut_off = []
    restore_nodes(run.nodes)


def _heal_controller(run: ClusterRun) -> None:
    """What is elsewhere is to end by itself, before the controller's machine is back."""
    _see_that_all_ends(run)
    run.here.heal()
    run.nodes.stop(run.controller_machine)  # the head has called this node dead
    restore_nodes(run.nodes)


def _driver(run: ClusterRun, moments: random.Random) -> None:
    del moments
    driver = run.driver()
    if driver is None:
        raise run.error("has no process that speaks to Ray")
    _kill(driver)


def restore_nodes(nodes: RayMachines) -> None:
    """Start Ray where it has ended, on machines that may have to be started first."""
    for name, machine in nodes.machines.items():
        if not machine.is_on:
            machine.power_on()
        if not machine.having("raylet/raylet"):
            nodes.stop(name)
            nodes.start(name)
            nodes.wait_for([name])
    nodes.wait_for(nodes.machines)


def _see_that_all_ends(run: ClusterRun) -> None:
    until = time.monotonic() + END_SECONDS
    while left := run.descendants():
        if time.monotonic() > until:
            raise run.error(f"left {len(left)} processes running")
        time.sleep(0.2)


def _restore_all(run: ClusterRun) -> None:
    """A cluster without its head is none: start all again."""
    nodes = run.nodes
    nodes.machines[nodes.head].heal()
    _see_that_all_ends(run)
    for name in nodes.machines:
        nodes.stop(name)
    nodes.start_all()


def _always(act: Callable[[ClusterRun], object]) -> Callable[[ClusterRun, random.Random], None]:
    """A fault that chance has no part in."""

    def happens(run: ClusterRun, _moments: random.Random) -> None:
        act(run)

    return happens


def _restore_nodes(run: ClusterRun) -> None:
    restore_nodes(run.nodes)


FAULTS = {
    one.name: one
    for one in (
        ClusterFault("generator", "generator", _child("generator")),
        ClusterFault("trainer", "trainer", _child("trainer")),
        ClusterFault("rank", "rank of a trainer of two, on machines apart", _rank, ranks=2),
        ClusterFault(
            "rank-machine", "all of the machine of a rank", _machine_of_a_rank, _restore_nodes,
            ranks=2,
        ),
        ClusterFault("worker", "Ray worker of a process", _worker),
        ClusterFault("agent", "agent of a process", _agent),
        ClusterFault("keeper", "keeper of a process", _keeper),
        ClusterFault("raylet", "raylet of a node", _raylet, _restore_nodes),
        ClusterFault("machine", "all of a machine at once", _machine, _restore_nodes),
        ClusterFault("relay", "relay of a node", _child("relay")),
        ClusterFault("short-cut", f"machine cut off for {SHORT_SECONDS:g} s", _cut_for_a_moment),
        ClusterFault("cut", "machine cut off until it is replaced", _cut, _heal),
        ClusterFault(
            "controller", "controller, then --resume", _always(ClusterRun.kill), ends_the_run=True
        ),
        ClusterFault(
            "driver", "process that speaks to Ray, then --resume", _driver, ends_the_run=True,
            expected_error=_DRIVER_LOST,
        ),
        ClusterFault(
            "own-raylet", "raylet of the controller's node, then --resume",
            _always(lambda run: _kill(run.nodes.raylet(run.controller_machine))),
            _restore_nodes, ends_the_run=True, expected_error=_NODE_LOST,
        ),
        ClusterFault(
            "head", "head, then --resume", _always(lambda run: _kill(run.nodes.head_process())),
            _restore_all, ends_the_run=True,
            expected_error=_HEAD_LOST,
        ),
        ClusterFault(
            "head-cut", "head's machine cut off, then --resume",
            _always(lambda run: run.nodes.machines[run.nodes.head].cut()), _restore_all,
            ends_the_run=True, expected_error=_HEAD_LOST,
        ),
        ClusterFault(
            "controller-cut", "controller's machine cut off, then --resume",
            _always(lambda run: run.here.cut()), _heal_controller, ends_the_run=True,
            expected_error=_HEAD_LOST,
        ),
    )
}  # fmt: skip
