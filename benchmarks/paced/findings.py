"""Results of benchmarks.paced: the runs, their simulations, and the ratios."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from asyncrl.simulation.outcome import Outcome
from benchmarks.harness import table, targets_table
from benchmarks.paced.run import Numbers
from benchmarks.paced.setting import KEEP_1, KEEP_4, SYNC, VERIFY, Paced


def tables(findings: Findings) -> list[Table]:
    """A table for each setting, and the targets."""
    return [_modes(findings, setting) for setting in findings.settings()] + [_targets(findings)]


def _modes(findings: Findings, setting: Paced) -> Table:
    first, end = setting.window
    rows = []
    for mode, one in findings.of(setting).items():
        n = one.numbers
        idle = (n.generator_idle, n.generator_device_idle, n.trainer_device_idle)
        rows.append([
            mode, f"{n.step_seconds:.3f}", f"{n.tokens_per_step:.0f}",
            *(f"{share:.1%}" for share in idle), None if n.kept is None else f"{n.kept:.1%}",
            f"{n.regenerated:.1%}", f"{n.staleness_max:.0f}", f"{n.computed:.1%}",
            f"{n.overrun:.1%}", f"{one.simulated.step_seconds:.3f} ({one.deviation:+.1%})",
        ])  # fmt: skip
    compared = findings.compared(setting).items()
    return table(
        f"{label(setting)}: {setting.machine.name}, training costs {setting.training:g} x "
        f"generation, steps {first} to {end - 1} of {setting.steps}, lengths / "
        f"{setting.scale.lengths:g}, dilated {setting.scale.dilation:g} x",
        "mode,s / step,tokens,gen. idle,gen. device,trainer dev.,kept,regen.,max stale,host,"
        "overrun,simulated",
        rows,
        caption=", ".join(f"{name} {value:.3f}" for name, value in compared)
        + "\ngen. device, trainer dev.: idle share of the modelled devices. host: real computation "
        "over the modelled time. overrun: share of the time by which steps were too slow",
    )


def _targets(findings: Findings) -> Table:
    made = targets_table(findings.ratios(), TARGETS, FLOORS)
    for run, reason in findings.failed.items():
        made.add_row(run, "", f"[bold red]{reason}[/]")
    return made


TARGETS = {
    "paced_sync_over_verify": 1.7,
    "paced_verify_over_keep1": 1.05,
    "paced_verify_over_keep4": 1.15,
    "paced_generator_idle": 0.03,
    "paced_staleness_max": 0.0,
    "sim_vs_paced": 0.05,
}
"""`paced_sync_over_verify` must be at least this, the others at most."""
FLOORS = frozenset({"paced_sync_over_verify"})


@dataclass(frozen=True)
class Result:
    """A paced run next to its simulation."""

    paced: Paced
    numbers: Numbers
    simulated: Outcome

    @property
    def deviation(self) -> float:
        """The simulator's step time over the measured one, minus 1."""
        return self.simulated.step_seconds / self.numbers.step_seconds - 1.0


def setting_of(paced: Paced) -> Paced:
    """What the runs of a comparison have in common: everything but the mode."""
    return replace(paced, mode=SYNC)


@dataclass
class Findings:
    """All runs, in the order in which they were made."""

    results: list[Result] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Run to the reason why it has no result."""

    def settings(self) -> list[Paced]:
        """The settings that were compared, in order."""
        return list(dict.fromkeys(setting_of(one.paced) for one in self.results))

    def of(self, setting: Paced) -> dict[str, Result]:
        """The results of a setting by mode."""
        return {one.paced.mode: one for one in self.results if setting_of(one.paced) == setting}

    def compared(self, setting: Paced) -> dict[str, float]:
        """The ratios of one setting; those of modes that did not run are missing.

        `..._per_token` are the same ratios per token trained on: the modes draw different answers.
        """
        modes = self.of(setting)
        found: dict[str, float] = {}
        if (verify := modes.get(VERIFY)) is not None:
            seconds, simulated = verify.numbers.step_seconds, verify.simulated.step_seconds
            per_token = verify.numbers.seconds_per_token
            if (sync := modes.get(SYNC)) is not None:
                found["sync_over_verify"] = sync.numbers.step_seconds / seconds
                found["sync_over_verify_per_token"] = sync.numbers.seconds_per_token / per_token
                found["simulated_sync_over_verify"] = sync.simulated.step_seconds / simulated
            for name, mode in (("keep1", KEEP_1), ("keep4", KEEP_4)):
                if (keep := modes.get(mode)) is not None:
                    found[f"verify_over_{name}"] = seconds / keep.numbers.step_seconds
                    found[f"verify_over_{name}_per_token"] = (
                        per_token / keep.numbers.seconds_per_token
                    )
                    found[f"simulated_verify_over_{name}"] = simulated / keep.simulated.step_seconds
            found["generator_idle"] = verify.numbers.generator_idle
            found["staleness_max"] = verify.numbers.staleness_max
            if verify.numbers.kept is not None:
                found["kept_share"] = verify.numbers.kept
        found["sim_vs_paced"] = max(abs(one.deviation) for one in modes.values())
        return found

    def ratios(self) -> dict[str, float]:
        """Name to number. The decisive ones, of the first setting, have no suffix."""
        found: dict[str, float] = {}
        for index, setting in enumerate(self.settings()):
            suffix = "" if index == 0 else "_" + label(setting).replace(" ", "_")
            for name, value in self.compared(setting).items():
                prefix = "" if name.startswith("sim") else "paced_"
                found[f"{prefix}{name}{suffix}"] = value
        return found

    def raw(self) -> dict[str, Any]:
        """Everything that was measured, for the JSON file."""
        return {
            "failed": self.failed,
            "runs": [
                {
                    "paced": asdict(one.paced),
                    "numbers": {k: v for k, v in asdict(one.numbers).items() if k != "lengths"},
                    "simulated": asdict(one.simulated),
                    "deviation": one.deviation,
                }
                for one in self.results
            ],
        }


def label(setting: Paced) -> str:
    """A short name of a setting: in what it differs from the first one."""
    base = Paced()
    parts = [f"{setting.generators}g"]
    if setting.training != base.training:
        parts.append(f"training {setting.training:g}")
    if setting.machine != base.machine:
        parts.append(f"{setting.machine.device} {setting.machine.model}")
    if setting.scale.lengths != base.scale.lengths:
        parts.append(f"scale {setting.scale.lengths:g}")
    if setting.scale.dilation != base.scale.dilation:
        parts.append(f"dilation {setting.scale.dilation:g}")
    return " ".join(parts)
