"""benchmarks.paced: the pace, the paced engine and learner's clock, reading, ratios, simulation."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

from asyncrl.config.run_config import load_config
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.torch.core import CoreSettings
from asyncrl.engine.torch.model import load_model
from asyncrl.monitoring.records.jsonl import read_jsonl
from asyncrl.rollout.trajectory import SampleId
from asyncrl.simulation.cost import DEVICES, MODELS, roofline
from asyncrl.simulation.outcome import Outcome
from asyncrl.tasks.loading import load_task
from asyncrl.wire.records.step import BatchMetrics, StalenessMetrics, StepMetrics, TokenCounts
from benchmarks.paced import main as paced_main
from benchmarks.paced import pace as paced_pace
from benchmarks.paced.child import RECORDS, PacedCore
from benchmarks.paced.findings import Findings, Result, tables
from benchmarks.paced.main import _lengths_by_step, simulate
from benchmarks.paced.model import Lengths, make_model
from benchmarks.paced.pace import PacedDevice, Scale, Work, cost_of_environment, pace_variable
from benchmarks.paced.reward import rarer_letters
from benchmarks.paced.run import Numbers, RunError, read_run
from benchmarks.paced.setting import (
    CONFIG,
    KEEP_4,
    MODES,
    PROMPT_TOKENS,
    SYNC,
    VERIFY,
    Paced,
    full,
    quick,
)

H200 = roofline(MODELS["7b"], DEVICES["h200"], trainer_devices=3, swap_seconds=0.5)


def test_a_scaled_run_has_the_costs_of_the_device() -> None:
    scale = Scale(lengths=50.0, rows=4.0, dilation=3.0)
    paced = scale.paced(H200)
    # 8 rows that stand for 32, with 30 tokens of context that stand for 1,500.
    assert paced.decode(8, 8 * 30) == pytest.approx(3 * H200.decode(32, 32 * 1500))
    assert paced.prefill(200, 8, 240) == pytest.approx(3 * H200.prefill(800, 32, 48_000))
    assert paced.train_token_seconds * 10 == pytest.approx(3 * H200.train_token_seconds * 40)
    # What happens once a step is as short as the step.
    assert paced.swap_seconds == pytest.approx(3 * H200.swap_seconds / 50)
    assert paced.free_tokens * 4 == pytest.approx(H200.free_tokens)


def test_training_costs_what_was_asked_for() -> None:
    for generators, training in ((1, 1.0), (4, 2.0)):
        paced = Paced(generators=generators, training=training)
        cost, mean = paced.cost(), paced.lengths.mean
        samples = paced.groups_per_step * 8
        row_step = cost.decode(paced.slots, paced.slots * (PROMPT_TOKENS + mean)) / paced.slots
        generation = samples * mean * row_step / generators
        trained = samples * (mean + PROMPT_TOKENS) * cost.train_token_seconds
        assert trained == pytest.approx(training * generation)


def test_the_pace_travels_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = Paced().cost()
    for name, value in pace_variable(cost).items():
        monkeypatch.setenv(name, value)
    assert cost_of_environment() == cost


class Clock:
    """Time that only passes in sleeps, each of which ends 2 ms late, and by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.002


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(paced_pace, "time", clock)
    return clock


def test_late_wakings_do_not_add_up(clock: Clock, tmp_path: Path) -> None:
    device = PacedDevice(tmp_path / "device.jsonl")
    for _ in range(100):
        began = device.begin()
        clock.now += 0.001  # the computation
        device.finish("step", began, 0.010)
    assert clock.now - 100.0 == pytest.approx(1.0 + 0.002)
    device.flush()
    lines = read_jsonl(tmp_path / "device.jsonl", Work)
    assert sum(line.seconds.get("step", 0.0) for line in lines) == pytest.approx(1.0)
    assert sum(line.items for line in lines) == 100
    assert sum(line.overrun for line in lines) == 0.0


def test_what_the_host_needs_beyond_the_model_is_not_hidden(clock: Clock, tmp_path: Path) -> None:
    device = PacedDevice(tmp_path / "device.jsonl")
    began = device.begin()
    clock.now += 0.030
    device.finish("step", began, 0.010)
    assert device.begin() == clock.now == pytest.approx(100.030)
    clock.now += 1.0  # the device is idle: that is not made up for
    assert device.begin() == clock.now
    device.flush()
    (line,) = read_jsonl(tmp_path / "device.jsonl", Work)
    assert line.overrun == pytest.approx(0.020)
    assert line.computed == pytest.approx(0.030)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("paced") / "model"
    make_model(path, Lengths(250.0))
    return path


def core_on(model: Path, device: PacedDevice, slots: int) -> PacedCore:
    loaded = load_model(
        str(model),
        slots=slots,
        max_len=96,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    PacedCore.device, PacedCore.cost = device, Paced().cost()
    settings = CoreSettings(
        max_step_tokens=None,
        max_draft_tokens=0,
        max_prefill_tokens=4096,
        chunk_tokens=16,
        top_k=4,
    )
    return PacedCore(loaded, settings, None, seed=1)


def test_steps_last_as_long_as_the_tokens_that_were_fed(
    clock: Clock, model: Path, tmp_path: Path
) -> None:
    device = PacedDevice(tmp_path / "device.jsonl")
    core, cost = core_on(model, device, 2), Paced().cost()
    prompt = np.arange(5, 205, dtype=np.int32) % 50 + 5
    sampling = SamplingParams(max_tokens=2, seed=3, top_k_logprobs=4)
    core.add(GenerateRequest("a", "a", prompt[:60], sampling))
    core.step()
    assert clock.now - 100.0 == pytest.approx(cost.step(60, 0) + 0.002)
    core.step()
    assert clock.now - 100.0 == pytest.approx(cost.step(60, 0) + cost.step(1, 61) + 0.002)
    core.step()  # without work, no time passes
    assert clock.now - 100.0 == pytest.approx(cost.step(60, 0) + cost.step(1, 61) + 0.002)


def test_the_models_lengths_are_the_mixture(clock: Clock, model: Path) -> None:
    del clock
    lengths = Lengths(250.0)
    core = core_on(model, PacedDevice(), 64)
    sampling = SamplingParams(lengths.longest, stop_tokens=(1,), top_k_logprobs=4)
    prompt = np.array([3, 50, 4], np.int32)
    for index in range(768):
        seeded = replace(sampling, seed=index)
        core.add(GenerateRequest(str(index), "p", prompt, seeded))
    drawn: dict[str, int] = {}
    while core.has_work:
        for chunk in core.step():
            drawn[chunk.request_id] = drawn.get(chunk.request_id, 0) + len(chunk.tokens)
    rng = random.Random(0)
    expected = [lengths.draw(rng) for _ in range(20_000)]
    # The standard error of the mean of 768 lengths is 4% of it.
    assert np.mean(list(drawn.values())) == pytest.approx(np.mean(expected), rel=0.14)
    assert np.median(list(drawn.values())) == pytest.approx(np.median(expected), abs=1)


def test_prompts_are_as_long_as_the_costs_assume(model: Path) -> None:
    task = load_task(load_config(CONFIG, ("task.train_size=256",)).task, str(model), 0)
    mean = np.mean([len(prompt.tokens) for prompt in task.train])
    assert mean == pytest.approx(PROMPT_TOKENS, abs=1.0)


def test_the_reward_counts_the_rarer_letters() -> None:
    assert rarer_letters("", "aabc", {}) == 0.5
    assert rarer_letters("", "", {}) == 0.0


# ------------------------------------------------------------------- readings


def lines(path: Path, rows: list[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Six steps of 2 s from second 1000 on; the device of the generator worked for 1.5 of them."""
    lines(
        tmp_path / "metrics.jsonl",
        [
            StepMetrics(
                step=step,
                time=1002.0 + 2 * step,
                wall_seconds=2.0 + 2 * step,
                tokens=TokenCounts(generated=110 * step, verified=40 * step, rejected=10 * step),
                batch=BatchMetrics(tokens=100),
                staleness=StalenessMetrics(mean=0.5, max=int(step == 3)),
            )
            for step in range(6)
        ],
    )
    for index in range(2):
        work = [Work(1001.9 + 2 * i, {"step": 1.5}, 10, 0.3, 0.1) for i in range(6)]
        lines(tmp_path / RECORDS / f"generator-{index}.jsonl", list(work))
        spans = [
            {"kind": "generating", "start": 1000.0, "end": 1009.0, "args": {}},
            {"kind": "waiting", "start": 1009.0, "end": 1012.0, "args": {"for": "new weights"}},
        ]
        lines(tmp_path / "timeline" / f"generator-{index}.jsonl", list(spans))
    trained = [Work(1001.9 + 2 * i, {"train": 1.0}, 1, 0.0, 0.0, [(i, 0, 7 + i)]) for i in range(6)]
    lines(tmp_path / RECORDS / "trainer.jsonl", list(trained))
    return tmp_path


def test_only_the_window_counts(run_folder: Path) -> None:
    found = read_run(run_folder, (2, 5))  # seconds 1004 to 1010
    assert found.step_seconds == pytest.approx(2)
    assert found.tokens_per_step == 100
    assert found.staleness_max == 1
    assert found.kept == pytest.approx(0.8)
    assert found.regenerated == pytest.approx(0.1)
    assert found.generator_idle == pytest.approx(1 / 6)
    assert found.generator_device_idle == pytest.approx(0.25)
    assert found.trainer_device_idle == pytest.approx(0.5)
    assert found.computed == pytest.approx(0.2)
    assert found.overrun == pytest.approx(0.05)
    assert found.between_steps == pytest.approx((10 - 9) / 60)  # 10 of 12 s, 9 s in 60 steps
    assert found.lengths[(5, 0)] == 12  # of the whole run, for the simulation


def test_runs_without_records_are_refused(run_folder: Path) -> None:
    with pytest.raises(RunError, match="6 steps"):
        read_run(run_folder, (2, 9))
    (run_folder / RECORDS / "trainer.jsonl").unlink()
    with pytest.raises(RunError, match="no records of its devices"):
        read_run(run_folder, (2, 5))


def numbers(seconds: float, **changes: object) -> Numbers:
    found = Numbers(
        step_seconds=seconds,
        tokens_per_step=100.0,
        staleness_max=0.0,
        kept=None,
        regenerated=0.0,
        generator_idle=0.01,
        idle_causes={"new weights": 0.01},
        generator_device_idle=0.02,
        trainer_device_idle=0.1,
        generator_busy={"step": 1.0},
        trainer_busy={"train": 1.0},
        computed=0.2,
        overrun=0.0,
        between_steps=0.001,
        lengths={},
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def result(paced: Paced, seconds: float, simulated: float, **changes: object) -> Result:
    outcome = Outcome(simulated, 50.0, 0.0, 0.1, 0.0, 0, 0.0, 28.0, 1000)
    return Result(paced, numbers(seconds, **changes), outcome)


def test_ratios_targets_and_tables() -> None:
    findings = Findings(
        [
            result(Paced(SYNC), 4.0, 4.0),
            result(Paced("keep(1)"), 2.2, 2.2),
            result(Paced(KEEP_4), 2.0, 1.94),
            result(Paced(VERIFY), 2.1, 2.1, kept=0.9, regenerated=0.05),
            result(Paced(SYNC, 2), 5.0, 5.0),
            result(Paced(VERIFY, 2), 2.0, 2.2),
        ],
        {"a-run": "it failed"},
    )
    found = findings.ratios()
    assert found["paced_sync_over_verify"] == pytest.approx(4 / 2.1)
    assert found["paced_verify_over_keep1"] == pytest.approx(2.1 / 2.2)
    assert found["paced_verify_over_keep4"] == pytest.approx(1.05)
    assert found["simulated_verify_over_keep4"] == pytest.approx(2.1 / 1.94)
    assert found["sim_vs_paced"] == pytest.approx(0.03)
    assert found["paced_kept_share"] == 0.9
    assert found["paced_sync_over_verify_2g"] == 2.5
    assert found["sim_vs_paced_2g"] == pytest.approx(0.1)
    assert "paced_verify_over_keep4_2g" not in found
    console = Console(width=170, record=True, file=io.StringIO())
    for table in tables(findings):
        console.print(table)
    printed = console.export_text()
    for text in ("keep(4)", "it failed", "-3.0%"):
        assert text in printed
    json.dumps(findings.raw())


def test_the_plans() -> None:
    assert [one.mode for one in quick()[:4]] == list(MODES)
    assert {one.generators for one in quick()} == {1, 2, 4}
    names = [one.name for one in full()]
    assert len(set(names)) == len(names)  # of folders
    assert {one.training for one in full()} == {0.5, 1.0, 2.0}
    for one in full():
        load_config(CONFIG, one.settings(CONFIG, CONFIG.parent))


def test_runs_that_fail_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(paced: Paced, model: Path, folder: Path) -> Numbers:
        assert (model / "config.json").is_file()
        assert folder == tmp_path
        if paced.mode == SYNC:
            raise RunError("broken\nmore")
        return numbers(2.0)

    monkeypatch.setattr(paced_main, "carry_out", fail)
    report = tmp_path / "report.json"
    arguments = ["--quick", "--modes", "sync,keep(4)", "--generators", "1", "--keep", str(tmp_path)]
    assert paced_main.main([*arguments, "--json", str(report)]) == 1
    printed = capsys.readouterr().out
    assert "broken" in printed
    assert "MISSING" in printed
    raw = json.loads(report.read_text())["raw"]
    assert list(raw["failed"].values()) == ["broken"]
    assert len(raw["runs"]) == 1
    with pytest.raises(SystemExit):
        paced_main.main(["--modes", "keep(9)"])


def test_the_simulation_repeats_lengths_and_rejections() -> None:
    paced = Paced(VERIFY, steps=12)
    rng = random.Random(5)
    samples = {(g, s): paced.lengths.draw(rng) for g in range(12 * 8) for s in range(8)}
    like = numbers(2.0, lengths=samples, regenerated=0.05, kept=0.95)
    found = simulate(paced, like)
    assert found.regenerated == pytest.approx(0.05, abs=0.01)
    assert found.staleness_max == 0
    first, end = paced.window
    timed = [n for (g, _), n in samples.items() if first * 8 <= g < end * 8]
    assert found.mean_length == pytest.approx(
        np.mean(timed), rel=0.05
    )  # 5% of them get another length
    sync = simulate(replace(paced, mode=SYNC), like)
    assert sync.step_seconds > found.step_seconds


def test_a_rejected_sample_gets_a_length_of_its_own_step() -> None:
    """Lengths change as the policy learns: those of other steps simulated runs 40% too slow."""
    known = {(g, s): 10 * (g // 8) + s for g in range(24) for s in range(8)}
    rng = random.Random(0)
    again = _lengths_by_step(known, 8)
    for step in range(3):
        drawn = {again(SampleId(8 * step + 3, 0), rng) for _ in range(200)}
        assert drawn == {10 * step + s for s in range(8)}
