"""The modes on devices of their own: real runs at the pace of modelled devices.

    python -m benchmarks.paced [--quick] [--json FILE]

Each run is `asyncrl run benchmarks/paced/paced.yaml` with its launcher, controller, sockets,
scheduler, verification, weights, the torch engine on a tiny model and the learner, one mode after
the other. After each engine step and each group's gradient the process sleeps until the time is
over that a roofline (`asyncrl.simulation.cost`) gives for an H200 and a 7B model. So generators and
trainer overlap as on devices of their own, whatever the cores of this machine do. Lengths are
heavy-tailed (median 1,000, up to 16,000 tokens) and divided by 64, see `benchmarks.paced.pace`.

The trainer has as many devices as make training cost as much as generation. Each run is simulated
with the same lengths, costs and scheduler (`benchmarks.paced.simulated`); the largest deviation of
the step times is `sim_vs_paced`. The simulator then makes the same runs with whole answers, on more
generators.

--quick: every mode with one generator, sync, keep(4) and verify with two and four. In full also
training at twice and half the cost, an H100 with 1.5B, half the scale, and no dilation, where
the host's own time shows; about 40 minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.simulation.outcome import Outcome
from asyncrl.simulation.study import as_json
from benchmarks.paced.findings import Findings, Result, label
from benchmarks.paced.model import make_model
from benchmarks.paced.plan import full, quick, smoke
from benchmarks.paced.run import RunError, carry_out
from benchmarks.paced.setting import MODES, VERIFY, Paced
from benchmarks.paced.simulated import fitted_drift, simulate, simulate_device
from benchmarks.paced.tables import large_table, tables
from benchmarks.report import add_smoke, write_json

PRINTED_WIDTH = 150
"""Characters per line if the output goes to a file."""


def measure(runs: Sequence[Paced], folder: Path, console: Console) -> Findings:
    """All runs. One that fails is recorded, and the others continue."""
    findings = Findings()
    for paced in runs:
        model = folder / f"model-{paced.scale.lengths:g}"
        if not model.exists():
            make_model(model, paced.lengths)
        try:
            numbers = carry_out(paced, model, folder)
        except RunError as error:
            findings.failed[paced.name] = str(error).splitlines()[0]
            console.print(str(error), style="bold red", markup=False, highlight=False)
            continue
        result = Result(paced, numbers, simulate(paced, numbers))
        findings.results.append(result)
        console.print(
            f"{label(paced)}, {paced.mode}: {numbers.step_seconds:.3f} s / step, simulated "
            f"{result.simulated.step_seconds:.3f} ({result.deviation:+.1%})",
            highlight=False,
        )
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the tables, write the file. Returns 1 if a run failed."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else PRINTED_WIDTH)
    planned = smoke() if options.smoke else quick() if options.quick else full()
    runs = [one for one in planned if _chosen(one, options)]
    load = os.getloadavg()[0]
    if load > 0.5:
        console.print(f"[yellow]the machine is busy (load {load:.1f}): timings are unreliable[/]")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.keep or made).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        findings = measure(runs, folder, console)
    for table in tables(findings):
        console.print(table)
    large = simulate_large(
        findings, (1,) if options.smoke else (1, 8) if options.quick else (1, 8, 64, 256)
    )
    if large:
        console.print(large_table(large, findings.results[0].paced.machine))
    if options.json:
        raw = {"load_before": load, "load_after": os.getloadavg()[0], **findings.raw()}
        raw["simulated"] = {generators: as_json(modes) for generators, modes in large.items()}
        write_json(options.json, "paced", raw, findings.ratios(), smoke=options.smoke)
    return 1 if findings.failed else 0


def simulate_large(findings: Findings, generators: Sequence[int]) -> dict[int, dict[str, Outcome]]:
    """Simulate whole answers with the drift of the first verified run; empty if there is none."""
    for one in findings.results:
        if one.paced.mode == VERIFY:
            drift = fitted_drift(one.paced, one.numbers)
            return {n: simulate_device(n, drift, one.paced.machine) for n in generators}
    return {}


def _chosen(paced: Paced, options: argparse.Namespace) -> bool:
    return paced.mode in options.modes and paced.generators in options.generators


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer settings, fewer steps")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs in this new folder")
    parser.add_argument("--modes", metavar="A,B", default=",".join(MODES), help="only these modes")
    parser.add_argument(
        "--generators", metavar="N,M", default="1,2,4", help="only these numbers of generators"
    )
    add_smoke(parser)
    options = parser.parse_args(arguments)
    options.modes = [name.strip() for name in options.modes.split(",")]
    options.generators = [int(number) for number in options.generators.split(",")]
    unknown = [name for name in options.modes if name not in MODES]
    if unknown:
        parser.error(f"no mode {unknown[0]!r}; the modes are {', '.join(MODES)}")
    return options
