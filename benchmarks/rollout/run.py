"""The parts of benchmarks.rollout, one after the other.

This is not part of `benchmarks.rollout.main`, because vLLM's core process imports the main module
again. If numba is loaded there, vLLM 0.32.0 cannot register its CPU kernels: it reads `__dict__` of
llvmlite's library object, which takes that for the name of a function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import util
from typing import Any

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from benchmarks.policies import Policies
from benchmarks.rollout import trees as rollout_trees
from benchmarks.rollout.contestants import contestants
from benchmarks.rollout.findings import LEFT_OUT, TREE_NODES, Findings
from benchmarks.rollout.kept import kept_tokens
from benchmarks.rollout.passes import OVERHEAD_ROWS, Bench, Plan, Workload
from benchmarks.sglang_interpreter import sglang_python

KINDS = ("vllm", "torch", "sglang")


@dataclass(frozen=True)
class Effort:
    plans: dict[str, Plan]
    """Kind of engine to the plan of its passes."""
    tree_repeats: int
    """Repeats of the comparison of trees with chains."""
    kept_prompts: int
    """Prompts for the comparison of verification rules."""
    tree_budgets: tuple[int, ...] = rollout_trees.BUDGETS

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
            torch = _sparse(rows or (8,), 2)
            plans = {"vllm": vllm, "torch": torch, "sglang": vllm}
            return cls(plans, tree_repeats=1, kept_prompts=32)
        vllm = Plan(rows or (1, 2, 8, 32, 128), 5)
        torch = _sparse(rows or (1, 8, 32), 5)
        plans = {"vllm": vllm, "torch": torch, "sglang": vllm}
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
        earlier, later = str(self.wide.earlier), self.wide.later
        found, missing = contestants(kind, earlier, later, config)
        self.findings.missing |= missing
        self.findings.measured[kind] = asyncio.run(Bench(found, self.wide, plan).run())

    def _trees(self) -> None:
        config = self._config("torch", rollout_trees.ROWS)
        for nodes in self.effort.tree_budgets:
            self.findings.trees[nodes] = rollout_trees.tree_and_chain(
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
