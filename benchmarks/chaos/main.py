"""Kill processes of real runs at random moments: does a run lose, repeat or change anything?

    python -m benchmarks.chaos [--quick] [--json FILE]

For each type of process one run of `examples/arithmetic.yaml` (embedded torch, `on_update: verify`
with run-ahead, `max_off_policy_steps: 0`) is started with the command line, as a user does. Again
and again, at a random moment, one process of the type is killed with SIGKILL, and the run has to
finish three more steps before the next kill. The controller is killed too; then `asyncrl run
--resume` follows at once. At the end the run is stopped in order. A further run with the same seed
is left alone. Then, from the files of the runs alone:

groups lost, twice    by `monitoring.records.group_account`, over all steps, resumes included
seconds to next step  longest time without a finished step, among the three that follow a kill;
                      also how much of it processes took to start
same ids              each step trained on the same groups as in the run left alone
lengths, p            Kolmogorov-Smirnov test of the response lengths trained on against those of
                      the run left alone, for the same steps; a run is called different below
                      p = 0.001, the probability of a false alarm. Both have the same prompts and
                      seeds, so most responses are alike and p is near 1 unless a kill changes
                      what is trained on
staleness             of the oldest token trained on, in optimizer steps
left over             processes, folders of sockets and shared files after the end of the run

The learning rate is a tenth of the example's, so that the policies of two runs stay close enough
for their lengths to be compared; verification still rejects tokens. Exit code 1 if a kill was not
survived, a group was lost or trained on twice, or anything else that must hold does not.

--stalls: nothing is killed. In one run with two ranks, two generators and the web page, in one
with environments, and in one on three agents with relays, each kind of process is stopped (SIGSTOP,
SIGCONT) and a random connection of each socket is held by a proxy, for 3, 8 and 15 s, ten times
each (--quick: once), in a random order. Then two steps have to be finished, no process may have
ended, and no group be lost, trained on twice or failed. `honest_killed`, `groups_lost`,
`groups_twice` are the ratios.

--quick: 20 kills of each type, about 20 minutes on two quiet cores. In full 60, and vLLM's engine
core where vLLM is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.chaos.campaign import kill_one_after_the_other
from benchmarks.chaos.cluster_faults import FAULTS
from benchmarks.chaos.findings import Findings
from benchmarks.chaos.live_run import Setup, carry_out
from benchmarks.chaos.on_cluster import measure_cluster
from benchmarks.chaos.stalls import KINDS, LENGTHS, Stalled, measure_stalls
from benchmarks.chaos.victims import (
    CONTROLLER,
    ENGINE_CORE,
    GENERATOR,
    RANK,
    REWARD,
    TRAINER,
    VICTIMS,
    Victim,
)
from benchmarks.machines.namespaces import why_not
from benchmarks.report import add_smoke, write_json
from benchmarks.tiny_models import smoke_settings

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "arithmetic.yaml"
SETTINGS = (
    *("scheduler.group_size=4", "scheduler.groups_per_step=4", "engine.slots=24"),
    *("trainer.learning_rate=2e-5", "trainer.checkpoint_every=5", "evaluation.prompts=4"),
    *("launcher.max_restarts=1000", "monitoring.live=plain"),
)
PRINTED_WIDTH = 150
"""Characters per line if the output goes to a file."""
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
        print(
            f"{name}: {len(outcome.kills)} of {len(victims)} recovered",
            outcome.failure or "",
            flush=True,
        )
    most = max((len(outcome.steps) for outcome in outcomes.values()), default=0)
    alone = carry_out(setup, "left-alone", min(alone_steps, max(1, most)))
    return Findings(wanted, outcomes, alone.records())


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else PRINTED_WIDTH)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.keep or made)
        folder.mkdir(parents=True, exist_ok=True)
        small = smoke_settings(folder) if options.smoke else ()
        setup = Setup(CONFIG, folder, (*SETTINGS, *small))
        if options.cluster:
            for findings in measure_cluster(setup, options.types, options.kills, options.seed):
                _write(options, findings, load)  # it takes long: what is known is kept
        elif options.stalls:
            return _stalls(options, setup, console, load)
        elif options.smoke:
            findings = measure(setup, SMOKE, len(SMOKE["each"]), options.seed, SMOKE_STEPS_ALONE)
        else:
            runs = {name: [VICTIMS[name]] * kills for name, kills in options.types.items()}
            findings = measure(setup, runs, options.kills, options.seed, MAX_STEPS_ALONE)
    console.print(findings.table())
    _write(options, findings, load)
    return 1 if findings.failed else 0


def _stalls(options: argparse.Namespace, setup: Setup, console: Console, load: float) -> int:
    kinds, times = {run: KINDS[run] for run in options.types}, 1 if options.quick else 10
    lengths: Sequence[float] = LENGTHS
    if options.smoke:
        kinds, lengths, times = {"arithmetic": ("generator", "connection:data")}, (1.0,), 1
    found = measure_stalls(setup, kinds, times, lengths, options.seed)
    console.print(found.table(), *found.failures)
    _write(options, found, load)
    return 1 if found.failed else 0


def _write(options: argparse.Namespace, findings: Findings | Stalled, load: float) -> None:
    if options.json:
        raw = {"load_before": load, "load_after": os.getloadavg()[0], **findings.raw()}
        write_json(options.json, "chaos", raw, findings.ratios(), smoke=options.smoke)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="20 kills of each type, no vLLM")
    parser.add_argument("--cluster", action="store_true", help="on a Ray cluster; needs root")
    parser.add_argument(
        "--stalls", action="store_true", help="stop processes and hold connections, kill nothing"
    )
    parser.add_argument("--kills", type=int, help="of each type, instead of 20 or 60")
    parser.add_argument(
        "--types",
        metavar="A,B",
        help=f"only these: {', '.join(VICTIMS)}; with --cluster {', '.join(FAULTS)}; with --stalls "
        f"the runs {', '.join(KINDS)}",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs in this folder")
    add_smoke(parser)
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
