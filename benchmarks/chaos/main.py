"""Kill processes of real runs at random moments: does a run lose, repeat or change anything?

    python -m benchmarks.chaos [--quick] [--json FILE]

For each type of process one run of `examples/arithmetic.yaml` (verified, with run-ahead, staleness
0) is started with the command line. Again and again, at a random moment, one process of the type is
killed with SIGKILL, and the run has to finish three more steps before the next kill. The controller
is killed too; then `asyncrl run --resume` follows. A further run with the same seed is left alone.
From the files of the runs alone: groups lost and trained on twice, the longest time without a step
among the three after a kill, whether each step trained on the groups of the run left alone, a
Kolmogorov-Smirnov test of response lengths against that run (`benchmarks.chaos.findings`),
staleness, and what is left over. The learning rate is a tenth of the example's, so that the lengths
of two runs can be compared. Exit code 1 if anything that must hold does not.

--cluster: the same on a Ray cluster of machines made of namespaces (`benchmarks.machines`; root).
--stalls: nothing is killed. Each kind of process is stopped (SIGSTOP, SIGCONT) and a random
connection of each socket is held by a proxy, for 3, 8 and 15 s, ten times each (--quick: once).
--quick: 20 kills of each type, about 20 minutes on two quiet cores. In full 60, and vLLM's engine
core where vLLM is installed.
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.chaos.campaign import (
    CONTROLLER,
    ENGINE_CORE,
    GENERATOR,
    RANK,
    REWARD,
    TRAINER,
    VICTIMS,
    Victim,
    kill_one_after_the_other,
)
from benchmarks.chaos.cluster_faults import FAULTS, measure_cluster
from benchmarks.chaos.findings import Findings
from benchmarks.chaos.live_run import Setup, carry_out
from benchmarks.chaos.stalls import KINDS, LENGTHS, Stalled, measure_stalls
from benchmarks.harness import parser_of, report
from benchmarks.machines.namespaces import why_not
from benchmarks.tiny_models import smoke_settings

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "arithmetic.yaml"
SETTINGS = (
    *("scheduler.group_size=4", "scheduler.groups_per_step=4", "engine.slots=24"),
    *("trainer.learning_rate=2e-5", "trainer.checkpoint_every=5", "evaluation.prompts=4"),
    *("launcher.max_restarts=1000", "monitoring.live=plain", "scheduler.max_runahead_groups=8"),
)
MAX_STEPS_ALONE = 400
"""The run left alone has at most this many steps."""
SMOKE = {"each": (GENERATOR, REWARD, CONTROLLER)}
SMOKE_STEPS_ALONE = 4


def measure(
    setup: Setup, runs: Mapping[str, Sequence[Victim]], wanted: int, seed: int, alone_steps: int
) -> Findings:
    """All runs with kills, then one left alone. Raises ChaosError if that one fails."""
    outcomes = {}
    for number, (name, victims) in enumerate(runs.items()):
        more = f"engine.kind={victims[0].engine}", f"trainer.ranks={victims[0].ranks}"
        own = Setup(setup.config, setup.folder, (*setup.settings, *more), setup.timeout_seconds)
        outcome = kill_one_after_the_other(own, name, victims, seed=seed + number)
        outcomes[name] = outcome
        print(f"{name}: {len(outcome.kills)} of {len(victims)}", outcome.failure or "", flush=True)
    most = max((len(outcome.steps) for outcome in outcomes.values()), default=0)
    alone = carry_out(setup, "left-alone", min(alone_steps, max(1, most)))
    return Findings(wanted, outcomes, alone.records())


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    found: Findings | Stalled
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.keep or made)
        folder.mkdir(parents=True, exist_ok=True)
        small = smoke_settings(folder) if options.smoke else ()
        setup = Setup(CONFIG, folder, (*SETTINGS, *small))
        if options.cluster:
            for found in measure_cluster(setup, options.types, options.kills, options.seed):
                report(options, "chaos", found.raw(), found.ratios())  # it takes long: kept
        elif options.stalls:
            found = _stalls(options, setup)
        elif options.smoke:
            found = measure(setup, SMOKE, len(SMOKE["each"]), options.seed, SMOKE_STEPS_ALONE)
        else:
            runs = {name: [VICTIMS[name]] * kills for name, kills in options.types.items()}
            found = measure(setup, runs, options.kills, options.seed, MAX_STEPS_ALONE)
    report(options, "chaos", found.raw(), found.ratios(), found.table())
    return 1 if found.failed else 0


def _stalls(options: argparse.Namespace, setup: Setup) -> Stalled:
    kinds, times = {run: KINDS[run] for run in options.types}, 1 if options.quick else 10
    lengths: Sequence[float] = LENGTHS
    if options.smoke:
        kinds, lengths, times = {"arithmetic": ("generator", "connection:data")}, (1.0,), 1
    found = measure_stalls(setup, kinds, times, lengths, options.seed)
    print(*found.failures, sep="\n")
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "20 kills of each type, no vLLM")
    parser.add_argument("--cluster", action="store_true", help="on a Ray cluster; needs root")
    parser.add_argument("--stalls", action="store_true", help="stop and hold, kill nothing")
    parser.add_argument("--kills", type=int, help="of each type, instead of 20 or 60")
    parser.add_argument(
        "--types",
        metavar="A,B",
        help=f"only these: {', '.join(VICTIMS)}; with --cluster {', '.join(FAULTS)}; with --stalls "
        f"the runs {', '.join(KINDS)}",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs in this folder")
    options = parser.parse_args(arguments)
    options.kills = options.kills or (20 if options.quick else 60)
    known: Collection[str] = FAULTS if options.cluster else KINDS if options.stalls else VICTIMS
    types = _types(quick=options.quick) if known is VICTIMS else list(known)
    asked = options.types.split(",") if options.types else types
    pairs = [one.partition(":")[::2] for one in asked]
    options.types = {name: int(number or options.kills) for name, number in pairs}
    unknown = [name for name in options.types if name not in known]
    if unknown:
        parser.error(f"no type {unknown[0]!r}; the types are {', '.join(known)}")
    if options.cluster and (reason := why_not()) is not None:
        parser.error(reason)
    return options


def _types(*, quick: bool) -> list[str]:
    """The types of processes to kill unless the user chooses."""
    types = [GENERATOR, TRAINER, RANK, REWARD, CONTROLLER]
    if not quick and importlib.util.find_spec("vllm") is not None:
        types.append(ENGINE_CORE)
    return [one.name for one in types]
