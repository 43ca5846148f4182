"""benchmarks.pipeline without its runs: reading, ratios, tables, and runs that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl.config.run_config import load_config
from asyncrl.rewards.functions import arithmetic
from asyncrl.tasks.builtin.arithmetic import draw_problems
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import ensure_builtin_model
from asyncrl.wire.records.step import (
    BatchMetrics,
    LearningMetrics,
    StalenessMetrics,
    StepMetrics,
    TokenCounts,
)
from benchmarks.pipeline import costs as pipeline_costs
from benchmarks.pipeline import main as pipeline
from benchmarks.pipeline import overlap
from benchmarks.pipeline import run as pipeline_run
from benchmarks.pipeline.costs import Costs
from benchmarks.pipeline.findings import Findings, tables
from benchmarks.pipeline.model import ModelRecipe, Muser, ensure_model
from benchmarks.pipeline.run import (
    CONFIG,
    FULL,
    GENERATOR,
    KEEP_4,
    QUICK,
    RUN_AHEAD,
    SYNC,
    TRAINER,
    VERIFY,
    Effort,
    Mode,
    RunError,
    RunNumbers,
    modes,
    read_run,
)
from benchmarks.policies import Variety
from benchmarks.tiny_models import SMOKE_START

COSTS = Costs(4, 100.0, 150.0, 450.0, (30.0, 60.0, 140.0))
EFFORT = Effort(steps=4, seeds=(0,), intermediate_size=512, evaluated=100)


def a_run(mode: str, seed: int = 0, **values: object) -> RunNumbers:
    run = RunNumbers(
        mode=mode,
        seed=seed,
        step_seconds=1.0,
        tokens_per_second=200.0,
        tokens_per_step=200.0,
        generated_per_step=210.0,
        staleness_mean=0.0,
        staleness_max=0.0,
        verified=90.0,
        rejected=10.0,
        busy={GENERATOR: {"generating": 0.8}, TRAINER: {"training": 0.6}},
        idle={GENERATOR: {"new weights": 0.15, "rewards": 0.05}, TRAINER: {"first group": 0.4}},
        rewards=[(float(i + 1), 0.5 + 0.01 * i) for i in range(20)],
        accuracy=0.6,
    )
    return replace(run, **values)  # type: ignore[arg-type]


def lines(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(msgspec.json.encode(row).decode() + "\n" for row in rows))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Six steps of 2 s from second 1000 on; step 0 is unlike the others."""
    lines(
        tmp_path / "metrics.jsonl",
        [
            StepMetrics(
                step=step,
                time=1002.0 + 2 * step,
                wall_seconds=2.0 + 2 * step,
                tokens=TokenCounts(
                    generated=999 + 110 * step, verified=40 * step, rejected=10 * step
                ),
                learning=LearningMetrics(reward_mean=0.1 * step),
                batch=BatchMetrics(tokens=50 if step == 0 else 100),
                staleness=StalenessMetrics(mean=0.5, max=int(step == 3)),
            )
            for step in range(6)
        ],
    )
    for name, spans in {
        GENERATOR: [
            ("generating", 1000.0, 1009.0, {}),
            ("waiting", 1009.0, 1010.0, {"for": "new weights"}),
            ("generating", 1010.0, 1012.0, {}),
        ],
        TRAINER: [("training", 1004.0, 1008.0, {}), ("waiting", 1008.0, 1010.0, {"for": "group"})],
    }.items():
        lines(
            tmp_path / "timeline" / f"{name}.jsonl",
            [{"kind": k, "start": s, "end": e, "args": a} for k, s, e, a in spans],
        )
    return tmp_path


def test_only_the_window_counts(run_folder: Path) -> None:
    found = read_run(run_folder, SYNC, 7, (2, 5))  # steps 2, 3, 4: seconds 1004 to 1010
    assert (found.mode, found.seed) == (SYNC, 7)
    assert found.step_seconds == pytest.approx(2)
    assert found.tokens_per_second == pytest.approx(50)
    assert found.generated_per_step == pytest.approx(110)
    assert (found.staleness_mean, found.staleness_max) == (0.5, 1)
    assert found.regenerated_share == pytest.approx(0.1)
    assert found.survival == pytest.approx(0.8)
    assert found.busy[GENERATOR] == {"generating": pytest.approx(5 / 3)}
    assert found.idle[GENERATOR] == {"new weights": pytest.approx(1 / 6)}
    assert found.idle_share(TRAINER) == pytest.approx(1 / 3)
    assert found.busy_seconds(TRAINER) == pytest.approx(4 / 3)
    assert found.rewards[0] == (2.0, 0.0)
    assert len(found.rewards) == 6
    assert read_run(run_folder, SYNC, 0, (1, 4)).staleness_max == 1
    assert read_run(run_folder, SYNC, 0, (1, 3)).staleness_max == 0


@pytest.mark.parametrize("window", [(0, 3), (3, 3), (2, 7)])
def test_a_window_that_was_not_run_is_refused(run_folder: Path, window: tuple[int, int]) -> None:
    with pytest.raises(RunError, match="has 6 steps"):
        read_run(run_folder, SYNC, 0, window)


def test_a_missing_time_line_is_refused(run_folder: Path) -> None:
    (run_folder / "timeline" / f"{TRAINER}.jsonl").unlink()
    with pytest.raises(RunError, match="no time line of trainer"):
        read_run(run_folder, SYNC, 0, (2, 5))


def test_modes_differ_in_the_scheduler_only() -> None:
    configs = [load_config(CONFIG, mode.settings) for mode in modes() if mode.missing() is None]
    assert len(configs) >= 5
    first = configs[0].model_dump(exclude={"scheduler"})
    assert all(config.model_dump(exclude={"scheduler"}) == first for config in configs)
    bounds = {"max_off_policy_steps", "on_update", "max_runahead_groups"}
    first = configs[0].scheduler.model_dump(exclude=bounds)
    assert all(config.scheduler.model_dump(exclude=bounds) == first for config in configs)
    assert configs[0].launcher.pin_cores
    assert configs[0].cache.enabled
    assert {SYNC, KEEP_4, VERIFY, RUN_AHEAD} <= {mode.name for mode in modes()}
    assert len({mode.slug for mode in modes()}) == len(modes())
    for effort in (QUICK, FULL):
        assert effort.window[1] - effort.window[0] >= 20


def test_ratios_by_hand() -> None:
    findings = Findings(EFFORT, COSTS, 1000)
    findings.runs = [
        a_run(SYNC, step_seconds=3.0, accuracy=0.7),
        a_run(KEEP_4, step_seconds=1.0, tokens_per_second=250.0),
        a_run(RUN_AHEAD, step_seconds=1.2, staleness_max=0.0, accuracy=0.6),
    ]
    ratios = findings.ratios()
    assert ratios["sync_over_verify"] == pytest.approx(2.5)
    assert ratios["verify_over_keep4"] == pytest.approx(1.2)
    assert ratios["verify_over_keep4_per_token"] == pytest.approx(1.25)
    assert ratios["sync_over_verify_per_token"] == pytest.approx(1.0)
    assert ratios["generator_idle"] == pytest.approx(0.2)
    assert ratios["regenerated_share"] == pytest.approx(0.05)
    assert ratios["score_over_decode"] == pytest.approx(4.5)
    assert ratios["training_over_generation"] == pytest.approx(0.75)
    assert ratios["accuracy_difference"] == pytest.approx(-0.1)
    # One seed: 1.96 standard errors of the two shares of 100 samples each.
    margin = 1.96 * np.sqrt((0.7 * 0.3 + 0.6 * 0.4) / 100)
    assert ratios["accuracy_difference_low"] == pytest.approx(-0.1 - margin)
    json.dumps(findings.raw())
    assert [table.row_count > 0 for table in tables(findings)] == [True] * 3


def test_seeds_give_students_interval() -> None:
    findings = Findings(replace(EFFORT, seeds=(0, 1, 2)), COSTS, 1000)
    for seed, (sync, verify) in enumerate([(0.70, 0.72), (0.80, 0.78), (0.60, 0.63)]):
        # Runs come in any order; the seed tells which belong together.
        findings.runs.insert(0, a_run(SYNC, seed, accuracy=sync))
        findings.runs.append(a_run(RUN_AHEAD, seed, accuracy=verify))
    difference = findings.accuracy_difference(RUN_AHEAD)
    assert difference is not None
    assert difference.mean == pytest.approx(0.01)
    margin = 4.303 * np.std([0.02, -0.02, 0.03], ddof=1) / np.sqrt(3)
    assert difference.high - difference.mean == pytest.approx(margin)
    assert difference.within_noise
    assert findings.accuracy_difference(KEEP_4) is None
    always = Findings(EFFORT, COSTS, 1000, runs=[a_run(SYNC, s, accuracy=0.5) for s in range(3)])
    always.runs += [a_run(RUN_AHEAD, s, accuracy=0.6 + s / 1000) for s in range(3)]
    worse = always.accuracy_difference(RUN_AHEAD)
    assert worse is not None
    assert not worse.within_noise


def test_failed_and_unsupported_modes_are_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[str, int]] = []

    def fake(mode: Mode, seed: int, *_args: object) -> RunNumbers:
        started.append((mode.name, seed))
        if mode.name == "keep(1)":
            raise RunError("keep-1-seed0 failed (1):\n[/] some words")
        return a_run(mode.name, seed)

    monkeypatch.setattr(pipeline, "run_and_evaluate", fake)
    monkeypatch.setattr(pipeline, "widen", lambda *_: 1000)
    monkeypatch.setattr(pipeline, "measure_costs", lambda *_: COSTS)
    monkeypatch.setattr(pipeline, "measure_slowdown", lambda _: 1.5)
    monkeypatch.setattr(pipeline, "held_out_accuracy", lambda *_: 0.5)
    impossible = Mode("mixed", ("scheduler.on_update=both",))
    chosen = (impossible, *modes())
    console = pipeline.Console(width=300)
    effort = replace(EFFORT, seeds=(0, 1))
    findings = pipeline.measure(effort, chosen, tmp_path, console, tmp_path)
    assert findings.failed
    assert "on_update" in findings.missing["mixed"]
    assert findings.missing["keep(1)"].startswith("failed")
    assert started.count(("keep(1)", 0)) == 1
    assert ("keep(1)", 1) not in started
    assert {(SYNC, 0), (SYNC, 1), (RUN_AHEAD, 0), (RUN_AHEAD, 1)} <= set(started)
    for table in tables(findings):
        console.print(table)
    output = capsys.readouterr().out
    assert "mixed is MISSING" in output
    assert "some words" in output


def test_a_run_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = modes()[0]
    monkeypatch.setattr(pipeline_run, "CONFIG", tmp_path / "nowhere.yaml")
    with pytest.raises(RunError, match="no configuration file"):
        pipeline_run.carry_out(
            mode, 0, model=tmp_path, effort=replace(EFFORT, steps=2), folder=tmp_path
        )


def test_a_muser_gives_correct_answers_of_very_uneven_length() -> None:
    rng = np.random.default_rng(0)
    problems = draw_problems(rng, (2, 3), held_out=False)
    muser = Muser()
    lengths = []
    for _ in range(400):
        problem = next(problems)
        text = muser.text(problem, rng, 0.0)
        assert arithmetic(problem.question, text, {"answer": problem.answer}) == 1.0
        lengths.append(len(text))
    assert np.percentile(lengths, 90) > 2 * np.median(lengths)
    assert max(lengths) <= muser.max_letters + 40


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


RECIPE = ModelRecipe(SMOKE_START, Muser(steps=2))


def test_the_model_is_made_once(cache_dir: Path) -> None:
    made = ensure_model(RECIPE, cache_dir)
    stamp = (made / "config.json").stat().st_mtime_ns
    assert ensure_model(RECIPE, cache_dir) == made
    assert (made / "config.json").stat().st_mtime_ns == stamp
    assert replace(RECIPE, version=2).digest() != RECIPE.digest()
    # Teaching has changed its weights.
    start = ensure_builtin_model(cache_dir, None, RECIPE.warm_start)
    assert (start / "model.safetensors").read_bytes() != (made / "model.safetensors").read_bytes()


def test_the_accuracy_is_that_of_an_evaluation(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    effort = replace(EFFORT, evaluated=8)
    model = ensure_model(RECIPE, cache_dir)
    assert 0 <= pipeline.held_out_accuracy(model, effort) <= 1
    monkeypatch.setattr(pipeline, "accuracy_of", lambda _: None)
    with pytest.raises(RunError, match="is incomplete"):
        pipeline.held_out_accuracy(model, effort)


def test_costs_are_of_the_same_tokens_decoded_and_scored(cache_dir: Path) -> None:
    model = str(ensure_model(RECIPE, cache_dir))
    config = load_config(CONFIG, ("task.train_size=4", "sampling.max_tokens=12"))
    task = load_task(config.task, model, 0)
    cache = config.cache.model_copy(update={"enabled": False})
    lengths, decoded, scored = asyncio.run(pipeline_costs._passes(config, task, model, cache))
    assert len(lengths) == 3 * pipeline_costs.GROUP
    assert all(1 <= length <= 12 for length in lengths)
    assert decoded > 0
    assert scored > 0
    assert COSTS.ratio == 4.5
    assert COSTS.ratio_with_cache == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--modes", "sync,asynk"], "'asynk' is not one of"), (["--steps", "10"], "at least 16")],
)
def test_bad_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        pipeline.main(arguments)
    assert message in capsys.readouterr().err


def test_the_variety_of_benchmarks_policies_is_unchanged() -> None:
    rng = np.random.default_rng(5)
    problem = next(draw_problems(rng, (4, 6), held_out=False))
    text = Variety().text(problem, rng, 0.06)
    assert arithmetic(problem.question, text, {"answer": problem.answer}) in (0.0, 1.0)
    assert set("".join(c for c in text if not c.isdigit())) <= set("+=:,. ")


def test_what_overlapping_can_bring_on_cores_that_slow_each_other_down() -> None:
    # Cores of their own: the longer of the two. Cores that share everything: nothing.
    assert overlap.bound(1.0, 3.0, 1.5, 1.5) == 2.0
    assert overlap.bound(2.0, 3.0, 1.5, 1.5) == 1.0
    assert overlap.bound(1.5, 3.0, 1.5, 1.5) == pytest.approx(4 / 3)
    assert overlap.bound(1.1, 4.0, 3.0, 1.0) == pytest.approx(4 / 3)  # generation is the longer
    found = Findings(EFFORT, COSTS, 1000, runs=[a_run(SYNC), a_run(RUN_AHEAD)], slowdown=1.5)
    assert found.ratios()["overlap_bound"] == pytest.approx(1.0 / (1.4 * 0.75), rel=1e-6)
    assert found.ratios()["overlap_slowdown"] == 1.5


@pytest.mark.usefixtures("_forked_runs")
def test_the_slowdown_of_two_processes_is_measured() -> None:
    assert 0.3 < overlap.measure_slowdown(0.02) < 6.0
