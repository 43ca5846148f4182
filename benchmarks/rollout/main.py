"""Rollouts of successive policy versions: our engines against the alternatives of a user.

    python -m benchmarks.rollout [--quick] [--json FILE]

    policies  versions of one model trained by this project (`benchmarks.policies`); epoch 1 is
              generated under the earlier one of `--versions`, epoch 2 is timed under the later one
    cost      both are widened to 101M parameters (`benchmarks.tiny_models`): a step reads 404 MB of
              weights, so decoding is bound by memory as on a GPU
    vllm      plain · its own `suffix` drafter · ours         (how: `benchmarks.rollout.passes`)
    torch     plain · chains · trees
    sglang    plain · ours
    trees     accepted tokens per forward pass with one node budget
    verify    tokens kept one optimizer step later

The statistic is the median ratio of tokens/s over pairs of passes, with its range. The first run
also trains the policies, which takes some minutes; they are stored in the cache directory.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.tasks.loading import load_task
from benchmarks.harness import names_of, parser_of, report, sglang_python
from benchmarks.policies import SMOKE, Policies, Recipe, drift_table, ensure_policies
from benchmarks.rollout import passes
from benchmarks.rollout.contestants import contestants
from benchmarks.rollout.findings import LEFT_OUT, TREE_NODES, Findings, tables
from benchmarks.rollout.kept import kept_tokens
from benchmarks.rollout.passes import GROUP, OVERHEAD_ROWS, Bench, Plan, Workload
from benchmarks.tiny_models import widen


@dataclass(frozen=True)
class Effort:
    plans: dict[str, Plan]
    """Kind of engine to the plan of its passes."""
    tree_repeats: int
    """Repeats of the comparison of trees with chains."""
    kept_prompts: int
    """Prompts for the comparison of verification rules."""
    tree_budgets: tuple[int, ...] = passes.BUDGETS

    @classmethod
    def of_smoke(cls) -> Effort:
        """As little as possible, of the torch engine only."""
        plans = {"torch": _sparse((2,), 1)}
        return cls(plans, tree_repeats=1, kept_prompts=2, tree_budgets=(TREE_NODES,))

    @classmethod
    def of(cls, *, quick: bool, rows: tuple[int, ...] | None) -> Effort:
        """The quick or the full effort; `rows` replaces the default numbers of rows."""
        if quick:
            vllm = Plan(rows or (1, 8, 32), 3, 1, step_rows=(1, 8, 16, 32), overhead_repeats=2)
            plans = {"vllm": vllm, "torch": _sparse(rows or (8,), 2), "sglang": vllm}
            return cls(plans, tree_repeats=1, kept_prompts=32)
        vllm = Plan(rows or (1, 2, 8, 32, 128), 5)
        plans = {"vllm": vllm, "torch": _sparse(rows or (1, 8, 32), 5), "sglang": vllm}
        return cls(plans, tree_repeats=4, kept_prompts=64)


def _sparse(rows: tuple[int, ...], repeats: int) -> Plan:
    return Plan(rows, repeats, step_rows=(), overhead_repeats=0)


@dataclass
class Measurement:
    """One run of the benchmark: its inputs and its findings so far."""

    kinds: Sequence[str]
    """Kinds of engines to measure."""
    policies: Policies
    wide: Workload
    """With widened weights, for what is timed."""
    narrow: Workload
    """With the weights as trained, for what is only counted."""
    effort: Effort
    findings: Findings = field(default_factory=Findings)

    def run(self) -> Findings:
        """Measure all parts, one after the other. The failure of one does not affect the others."""
        for kind in KINDS:
            if kind not in self.kinds:
                self.findings.missing[kind] = LEFT_OUT
            elif (why := _lacking(kind)) is not None:
                self.findings.missing[kind] = why
            else:
                self._part(kind, partial(self._rates, kind))
        if "torch" in self.kinds:
            self._part("tree_vs_chain", self._trees)
            self._part("verify_kept_vs_specrl", self._kept)
        return self.findings

    def _part(self, name: str, part: Callable[[], None]) -> None:
        try:
            part()
        except EngineError as error:
            self.findings.missing[name] = f"failed: {error}"
            self.findings.failed = True

    def _rates(self, kind: str) -> None:
        plan = self.effort.plans[kind]
        config = self._config(kind, max(*plan.rows, OVERHEAD_ROWS))
        found, missing = contestants(kind, str(self.wide.earlier), config)
        self.findings.missing |= missing
        self.findings.measured[kind] = asyncio.run(Bench(found, self.wide, plan).run())

    def _trees(self) -> None:
        config = self._config("torch", passes.ROWS)
        for nodes in self.effort.tree_budgets:
            self.findings.trees[nodes] = passes.tree_and_chain(
                self.narrow, config, self.effort.tree_repeats, nodes
            )

    def _kept(self) -> None:
        """Compare the rules on each pair of versions that are one optimizer step apart."""
        paths = self.policies.paths
        steps = [(version, version + 1) for version in paths if version + 1 in paths]
        prompts = self.narrow.task.train[: self.effort.kept_prompts]
        for earlier, later in steps:
            self.findings.kept[f"{earlier} to {later}"] = asyncio.run(
                kept_tokens(
                    paths[earlier], paths[later], self.narrow.task, prompts, self.narrow.max_tokens
                )
            )

    def _config(self, kind: str, slots: int) -> EngineConfig:
        """The project's defaults, with slots and lengths that fit the workload."""
        length = self.policies.recipe.max_model_len
        values: dict[str, Any] = {"kind": kind, "slots": slots, "max_model_len": length}
        if kind == "sglang":
            values["sglang"] = {"python": sglang_python()}
        return EngineConfig.model_validate(values)


def _lacking(kind: str) -> str | None:
    """Why an engine cannot run here; None: it can."""
    if kind == "sglang":
        try:
            sglang_python()
        except EngineStartError as error:
            return str(error)
        return None
    if util.find_spec(kind) is None:
        return f"{kind} is not installed (`make bench` installs it)"
    return None


KINDS = ("vllm", "torch", "sglang")
WIDE = 684 * 128
"""Intermediate size that gives the trained model 101 million parameters."""
SPARE_PROMPTS = 512
"""Prompts beyond those trained on, for large batches."""
EPOCH = (0, 16)
"""Policy versions of epochs 1 and 2: one epoch of training apart."""


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) if part.isdigit() else 0 for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers like 1,8,32")
    return numbers


def _versions(text: str) -> tuple[int, int]:
    kept = Recipe().keep
    pair = tuple(int(part) if part.isdigit() else -1 for part in text.split(","))
    if len(pair) != 2 or pair[0] not in kept or pair[1] not in kept or pair[0] > pair[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair EARLIER,LATER of {kept}")
    return pair[0], pair[1]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "under 6 minutes; in full under 30")
    parser.add_argument(
        "--engines",
        "--engine",
        default="vllm,torch",
        help="of vllm, torch and sglang; default: vllm,torch",
    )
    parser.add_argument("--rows", type=_numbers, help="requests at a time, e.g. 1,8,32")
    parser.add_argument(
        "--versions",
        type=_versions,
        default=EPOCH,
        metavar="EARLIER,LATER",
        help="policy versions of epoch 1 and 2; default %(default)s, an epoch of training",
    )
    parser.add_argument(
        "--widened",
        type=int,
        default=WIDE,
        metavar="SIZE",
        help="intermediate_size of the model that is timed; default %(default)s",
    )

    options = parser.parse_args(arguments)
    options.engines = names_of(parser, options.engines, KINDS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    disable_progress_bar()
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.engines, options.versions, options.widened = ["torch"], SMOKE.keep, 128
            policies, effort = ensure_policies(SMOKE, Path(folder)), Effort.of_smoke()
        else:
            policies = ensure_policies()
            effort = Effort.of(quick=options.quick, rows=options.rows)
        earlier, later = (policies.paths[version] for version in options.versions)
        recipe = policies.recipe
        task = load_task(recipe.task(recipe.prompts + SPARE_PROMPTS), str(earlier), 0)
        wide = [Path(folder) / side for side in ("earlier", "later")]
        for source, target in zip((earlier, later), wide, strict=True):
            raw["parameters"] = widen(str(source), target, options.widened)
        measurement = Measurement(
            options.engines,
            policies,
            Workload(task, recipe.max_tokens, wide[0], wide[1]),
            Workload(task, recipe.max_tokens, earlier, later),
            effort,
        )
        findings = measurement.run()
    for part, reason in findings.missing.items():
        print(f"{part} was NOT measured: {reason}")
    raw |= {
        "versions": options.versions,
        "drift_total_variation_per_token": policies.drift,
        "mean_probability_of_own_tokens": policies.certainty,
        "accuracy": policies.accuracy,
        "intermediate_size": options.widened,
        "samples_per_prompt": GROUP,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **findings.raw(),
    }
    shown = (drift_table(policies), *tables(findings))
    report(options, "rollout", raw, findings.ratios(), *shown)
    return 1 if findings.failed else 0
