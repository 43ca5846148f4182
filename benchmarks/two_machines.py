"""One training on one machine and on two: the same accuracy, the same groups, nothing stale.

    python -m benchmarks.two_machines [--quick] [--ranks] [--json FILE]

`examples/arithmetic.yaml` is trained twice with the command line: locally, and on a Ray cluster of
two machines made of namespaces (`benchmarks.machines`; needs root), with the controller and the
trainer on one and both generators on the other. Between them are real TCP connections and nothing
else: each has memory of its own, and the generators' machine does not see the run's folder. There
is no simulated delay.

--ranks: both trainers have two ranks, those of the cluster on two machines, which both see the
run's folder.

Exit code 1 if a group was lost or trained on twice, if a step was trained on other groups than
locally or on stale tokens, or if accuracies after training differ by more than four standard errors
(each is of the same number of samples, drawn as in training; a false alarm has a probability below
0.0001).

--quick: 20 steps instead of 80.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.monitoring.records.group_account import read_account
from asyncrl.wire.records.step import RunResult
from benchmarks.chaos.cluster_faults import RANKS_APART
from benchmarks.chaos.cluster_run import ClusterRun
from benchmarks.chaos.live_run import LiveRun, Setup, carry_out
from benchmarks.chaos.main import CONFIG
from benchmarks.harness import parser_of, pick, report
from benchmarks.machines.namespaces import NoMachinesError
from benchmarks.machines.ray import ray_machines

SETTINGS = ("launcher.generators=2", "monitoring.live=plain")
PLACED = (
    *("launcher.kind=ray", "launcher.ray.trainer.resources={one: 1}"),
    "launcher.ray.generator.resources={two: 1}",
)
ERRORS = 4.0
"""Standard errors that accuracies may differ by."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "20 steps")
    parser.add_argument("--ranks", action="store_true", help="two ranks of the trainer")
    options = parser.parse_args(arguments)
    steps = pick(options, 80, 20, 2)
    with tempfile.TemporaryDirectory() as made:
        try:
            local, placed = _both(Path(made), steps, ranks=options.ranks)
        except NoMachinesError as error:
            parser.error(str(error))
        ratios = _ratios(local, placed)
        raw = {
            "local": msgspec.to_builtins(_result(local)),
            "two_machines": msgspec.to_builtins(_result(placed)),
        }
    report(options, "two_machines", raw, ratios)
    must_be_zero = ("groups_lost", "groups_twice", "steps_with_other_groups", "staleness_max")
    failed = any(ratios[name] for name in must_be_zero)
    return 1 if failed or abs(ratios["difference_in_standard_errors"]) > ERRORS else 0


def _both(folder: Path, steps: int, *, ranks: bool) -> tuple[LiveRun, LiveRun]:
    """The local run, and the one on two machines."""
    several = ("trainer.ranks=2",) if ranks else ()
    local = carry_out(Setup(CONFIG, folder, (*SETTINGS, *several), 1800), "local", steps)
    runs = folder / "runs"
    runs.mkdir()
    hidden = {} if ranks else {"two": [runs]}
    with ray_machines({"one": 1, "two": 3}, folder / "machines", hidden=hidden) as cluster:
        setup = Setup(CONFIG, runs, (*SETTINGS, *PLACED, *(RANKS_APART if ranks else ())), 1800)
        placed = ClusterRun(setup, "placed", steps, cluster=cluster, controller_machine="one")
        placed.start()
        code = placed.end(in_order=False)
        if code or sum(placed.leftovers().values()):
            raise placed.error(f"ended with exit code {code} and left {placed.leftovers()}")
    return local, placed


def _result(run: LiveRun) -> RunResult:
    return msgspec.json.decode((run.path / "result.json").read_bytes(), type=RunResult)


def _ratios(local: LiveRun, placed: LiveRun) -> dict[str, float]:
    one, two, account = _result(local), _result(placed), read_account(placed.path)
    assert one.accuracy_after is not None
    assert two.accuracy_after is not None
    samples = one.evaluation_samples
    variance = sum(p * (1 - p) / samples for p in (one.accuracy_after, two.accuracy_after))
    pairs = zip(local.records(), placed.records(), strict=True)
    return {
        "accuracy_before": one.accuracy_before or 0.0,
        "accuracy_after_local": one.accuracy_after,
        "accuracy_after_two_machines": two.accuracy_after,
        "difference_in_standard_errors": (two.accuracy_after - one.accuracy_after)
        / math.sqrt(max(variance, 1 / samples**2)),
        "steps": two.steps,
        "steps_with_other_groups": sum(a.groups.trained != b.groups.trained for a, b in pairs),
        "groups_lost": len(account.lost),
        "groups_twice": len(account.twice),
        "staleness_max": two.staleness.max,
        "seconds_local": one.wall_seconds,
        "seconds_two_machines": two.wall_seconds,
    }


if __name__ == "__main__":
    raise SystemExit(main())
