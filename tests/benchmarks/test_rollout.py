"""benchmarks.rollout in miniature: its JSON is complete, and missing parts are reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from benchmarks.policies import Policies
from benchmarks.rollout import main
from benchmarks.rollout.findings import TARGETS, Findings, Kind, Pass, RepeatedPasses, tables
from benchmarks.rollout.passes import Plan, Workload

pytestmark = pytest.mark.slow


def test_a_part_that_fails_is_reported_and_the_others_run(policies: Policies) -> None:
    task = load_task(TaskConfig(train_size=8), str(policies.paths[0]), 0)
    nowhere = Workload(task, 8, Path("/nowhere"), Path("/nowhere"))
    plan = Plan((1,), repeats=1, step_rows=(), overhead_repeats=0)
    effort = main.Effort({"torch": plan}, tree_repeats=1, kept_prompts=1)
    narrow = Workload(task, 8, policies.paths[0], policies.paths[1])
    findings = main.Measurement(["torch"], policies, nowhere, narrow, effort).run()
    assert findings.failed
    assert "failed" in findings.missing["torch"]
    assert "verify_kept_vs_specrl" in findings.ratios()


def test_the_main_module_is_light() -> None:
    """vLLM's core process imports it again, and fails if numba is loaded."""
    code = (
        "import sys, benchmarks.rollout; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_engines_that_are_not_installed_are_reported(
    monkeypatch: pytest.MonkeyPatch, policies: Policies
) -> None:
    monkeypatch.setattr(main.util, "find_spec", lambda name: None)
    task = load_task(TaskConfig(train_size=8), str(policies.paths[0]), 0)
    work = Workload(task, 8, policies.paths[0], policies.paths[1])
    effort = main.Effort.of(quick=True, rows=(1,))
    findings = main.Measurement(["vllm"], policies, work, work, effort).run()
    assert "vllm is not installed" in findings.missing["vllm"]
    assert findings.ratios() == {}
    (last,) = tables(findings)
    assert last.row_count == sum(not name.startswith("sglang") for name in TARGETS)


def test_ratios_are_medians_of_pairs_and_the_bound_is_the_best_step() -> None:
    def passes(*seconds: float) -> list[Pass]:
        return [Pass(100, s, 10, 20, 10) for s in seconds]

    rows = RepeatedPasses(
        8, {"plain": passes(4, 6, 8), "ours": passes(1, 2, 1), "suffix": passes(2, 2, 2)}
    )
    kind = Kind({1: rows}, steps={1: 1.0, 8: 2.0, 32: 16.0})
    kind.overhead = [(Pass(10, 1.0, 10, 0, 0), Pass(10, 1.1, 10, 0, 0))]
    ratios = Findings({"vllm": kind}).ratios()
    assert ratios["vllm_b1_vs_plain"] == 4
    assert ratios["vllm_b1_vs_suffix"] == 2
    assert ratios["overhead_b64"] == pytest.approx(0.1)
    assert kind.bound(1) == 4
    assert kind.bound(8) == 1
    assert rows.drafting("ours") == {
        "acceptance": 0.5,
        "drafted_per_step": 2,
        "accepted_per_step": 1,
        "tokens_per_step": 10,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "vlm"], "'vlm' is not one of vllm"),
        (["--rows", "1,0"], "positive numbers"),
        (["--versions", "0,3"], "not a pair EARLIER,LATER of"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(arguments)
    assert message in capsys.readouterr().err
