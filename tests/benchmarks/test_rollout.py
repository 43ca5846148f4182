"""benchmarks.rollout in miniature: its JSON is complete, and missing parts are reported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from served_sglang import sglang_python

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.sglang.config import SglangConfig
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from benchmarks.policies import Policies
from benchmarks.rollout import main as rollout
from benchmarks.rollout import run as rollout_run
from benchmarks.rollout.contestants import contestants
from benchmarks.rollout.findings import TARGETS, Findings, Kind, Pass, RepeatedPasses
from benchmarks.rollout.ngram import NgramEngine
from benchmarks.rollout.passes import Plan, Workload
from benchmarks.rollout.tables import tables

pytestmark = pytest.mark.slow


def test_a_part_that_fails_is_reported_and_the_others_run(policies: Policies) -> None:
    task = load_task(TaskConfig(train_size=8), str(policies.paths[0]), 0)
    nowhere = Workload(task, 8, Path("/nowhere"), Path("/nowhere"))
    plan = Plan((1,), repeats=1, step_rows=(), overhead_repeats=0)
    effort = rollout_run.Effort({"torch": plan}, tree_repeats=1, kept_prompts=1)
    narrow = Workload(task, 8, policies.paths[0], policies.paths[1])
    findings = rollout_run.Measurement(["torch"], policies, nowhere, narrow, effort).run()
    assert findings.failed
    assert "failed" in findings.missing["torch"]
    assert "verify_kept_vs_specrl" in findings.ratios()


def test_the_main_module_is_light() -> None:
    """vLLM's core process imports it again, and fails if numba is loaded."""
    code = (
        "import sys, benchmarks.rollout; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.sglang
def test_sglangs_own_ngram_is_refused_where_it_cannot_run(policies: Policies) -> None:
    """Its reason is given, and the other contestants are there."""
    config = EngineConfig(kind="sglang", sglang=SglangConfig(python=sglang_python()))
    path = policies.paths[0]
    found, missing = contestants("sglang", str(path), path, config)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: nothing of it is refused")
    assert [one.name for one in found] == ["plain", "ours"]
    assert missing == {
        "sglang ngram": "it needs a GPU: on a CPU it commits the argmax at any temperature"
    }


_SERVER = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "weights" in asked:
        good = asked["weights"].endswith("good")
        print(json.dumps({"weights": good, "error": "no such file"}), flush=True)
    elif len(asked["input_ids"]) > 3:
        break
    else:
        most = asked["sampling_params"]["max_new_tokens"]
        answer = {"id": asked["id"], "tokens": most, "verified": 2, "correct": most - 2}
        print(json.dumps(answer), flush=True)
"""
"""Answers as `benchmarks.rollout.ngram_server` does; dies of a long prompt."""


def test_the_client_of_ngram_counts_and_fails_with_its_server() -> None:
    async def run() -> None:
        engine = NgramEngine([sys.executable, "-c", _SERVER], Path("/good"), draft_tokens=16)
        await engine.start()

        async def generate(length: int, prompt: int = 3) -> int:
            request = GenerateRequest(
                "r", "k", np.ones(prompt, np.int32), SamplingParams(length, seed=1)
            )
            return sum([len(chunk.tokens) async for chunk in engine.generate(request)])

        try:
            assert await asyncio.gather(generate(5), generate(9)) == [5, 9]
            await engine.install_weights(1)
            stats = engine.stats()
            assert (stats.steps, stats.tokens.drafted, stats.tokens.accepted) == (4, 64, 10)
            engine._later = Path("/bad")
            with pytest.raises(EngineError, match="did not load /bad: no such file"):
                await engine.install_weights(1)
            with pytest.raises(EngineError, match="has ended"):
                await generate(5, prompt=4)
        finally:
            await engine.close()
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_engines_that_are_not_installed_are_reported(
    monkeypatch: pytest.MonkeyPatch, policies: Policies
) -> None:
    monkeypatch.setattr(rollout_run.util, "find_spec", lambda name: None)
    task = load_task(TaskConfig(train_size=8), str(policies.paths[0]), 0)
    work = Workload(task, 8, policies.paths[0], policies.paths[1])
    effort = rollout_run.Effort.of(quick=True, rows=(1,))
    findings = rollout_run.Measurement(["vllm"], policies, work, work, effort).run()
    assert "vllm is not installed" in findings.missing["vllm"]
    assert findings.ratios() == {}
    (last,) = tables(findings)
    assert last.row_count == len(TARGETS)


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
        (["--engines", "vlm"], "no engine 'vlm'"),
        (["--rows", "1,0"], "positive numbers"),
        (["--versions", "0,3"], "not a pair EARLIER,LATER of"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        rollout.main(arguments)
    assert message in capsys.readouterr().err
