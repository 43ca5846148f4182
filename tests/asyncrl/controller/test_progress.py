"""What the controller makes of the reports of generators and trainer."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console
from step_records import full_step

from asyncrl.config.run_config import RunConfig
from asyncrl.controller.progress import Progress
from asyncrl.controller.statistics import GenerationTotals
from asyncrl.monitoring.config import MonitoringConfig
from asyncrl.monitoring.metrics.metrics import ControllerMetrics, new_registry
from asyncrl.monitoring.records.metrics_log import MetricsLog, read_metrics
from asyncrl.monitoring.terminal.live import LiveView
from asyncrl.monitoring.terminal.status_text import status_lines
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.steering.status_stream import status_reply
from asyncrl.wire.messages.from_generator import GeneratorReport
from asyncrl.wire.messages.from_trainer import StepFinished
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.reward_counts import RewardCounts, RewardWait
from asyncrl.wire.records.step import (
    BatchMetrics,
    EngineStats,
    GroupTotals,
    LearnerMetrics,
    LearningMetrics,
    SignalTotals,
    StalenessMetrics,
    StepGroups,
    StepMetrics,
    TokenCounts,
    TrainerTimes,
)
from asyncrl.wire.records.wrong_policy import Cause, WrongPolicy
from asyncrl.wire.weights.layout import WeightManifest

GROUP_SIZE = 4


class Generators:
    """Stands in for the fleet: two generators, one of them lost, and an idle trainer."""

    def __init__(self) -> None:
        self.trainer: Any = SimpleNamespace(
            name="trainer", state="ready", report=None, policy_version=0, metrics_port=None
        )  # fmt: skip
        self.workers: list[Any] = [
            SimpleNamespace(
                name=f"generator-{i}", state=state, report=None, policy_version=0, metrics_port=None
            )
            for i, state in enumerate(("ready", "lost"))
        ]  # fmt: skip
        self.ranks = [self.trainer]
        self.all_ready = True

    def everyone(self) -> list[Any]:
        return [self.trainer, *self.workers]

    @property
    def every_generator(self) -> list[Any]:
        return self.workers

    def generators(self) -> list[Any]:
        return self.workers[:1]

    def report(
        self,
        index: int,
        tokens: TokenCounts | None = None,
        busy_seconds: float = 0.0,
        rewards: RewardCounts | None = None,
        noise_floor: NoiseFloor | None = None,
        reward_wait: RewardWait | None = None,
    ) -> None:
        stats = EngineStats(tokens=tokens or TokenCounts(), busy_seconds=busy_seconds)
        self.workers[index].report = GeneratorReport(
            f"generator-{index}",
            engine=stats,
            held=0,
            rewards_waiting=0,
            rewards=rewards or RewardCounts(),
            noise_floor=noise_floor or NoiseFloor(),
            reward_wait=reward_wait or RewardWait(),
        )


class Watched:
    """A Progress and everything that can be seen of it."""

    def __init__(self, path: Path, earlier: list[StepMetrics], **sections: Any) -> None:
        self.path = path
        self.registry: CollectorRegistry = new_registry()
        self.said = io.StringIO()
        view = LiveView(MonitoringConfig(live="plain"), 3, "run", Console(file=self.said, width=80))
        self.log = MetricsLog(path)
        self.config = RunConfig.model_validate(
            {"scheduler": {"group_size": GROUP_SIZE}, **sections}
        )
        self.progress = Progress(
            self.config,
            view=view,
            log=self.log,
            metrics=ControllerMetrics.register(self.registry, "controller"),
            earlier=earlier,
        )
        self.fleet: Any = Generators()
        self.paused = False

    def begin(self, first_step: int) -> None:
        snapshot = SimpleNamespace(
            waits=(), samples_running=5, samples_held=2,
            groups_issued=20, groups_waiting=3, groups_consumed=6, groups_failed=2,
            groups_without_signal=0, groups_left_over=0, signal_share=None,
        )  # fmt: skip
        per_step = SchedulerConfig().groups_per_step
        ledger = SimpleNamespace(end_of=lambda step: (step + 1) * per_step)
        state = SimpleNamespace(ledger=ledger)
        scheduler: Any = SimpleNamespace(
            snapshot=lambda *known: self.ask(snapshot, *known), state=state
        )
        self.progress.show(self.fleet, None)
        self.progress.training_begins(scheduler, first_step)

    def ask(self, snapshot: Any, unscored: int = 0, about: str = "") -> Any:
        waits = (f"step 0 waits for the rewards of {unscored}{about}",) if unscored else ()
        return SimpleNamespace(
            **{**vars(snapshot), "unrewarded": unscored, "waits": waits, "paused": self.paused}
        )

    def status(self) -> dict[str, Any]:
        view = self.progress.view(self.fleet, None)
        return status_reply(self.config, self.fleet, view).status

    def finish(self, step: int, metrics: LearnerMetrics, times: TrainerTimes) -> StepMetrics:
        manifest = WeightManifest(step + 1, "/nowhere", 0, ())
        self.progress.step_finished(StepFinished(step, (step,), manifest, metrics, times))
        return read_metrics(self.path)[-1]

    def gauge(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(name, {"process": "controller", **labels})
        assert value is not None, name
        return value


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "metrics.jsonl", earlier=[])
    yield made
    made.log.close()


def sent(**more: Any) -> LearnerMetrics:
    """What a trainer sends when every number of it is known."""
    full = full_step()
    values = {name: getattr(full, name) for name in LearnerMetrics.__struct_fields__}
    return LearnerMetrics(**{**values, **more})


def test_what_the_trainer_sent_reaches_the_record_whole(watched: Watched) -> None:
    watched.begin(0)
    step = watched.finish(0, sent(), TrainerTimes())
    for name in LearnerMetrics.__struct_fields__:
        assert getattr(step, name) == getattr(sent(), name)
    assert watched.gauge("asyncrl_reward_mean") == sent().learning.reward_mean
    assert watched.gauge("asyncrl_staleness_max_steps") == sent().staleness.max


def test_each_step_has_a_line_though_two_finish_between_two_looks(watched: Watched) -> None:
    watched.begin(0)
    for step in range(3):
        watched.finish(step, sent(), TrainerTimes())
    watched.progress.show(watched.fleet, None)
    lines = [line for line in watched.said.getvalue().splitlines() if "/3 steps |" in line]
    assert [line.partition("/")[0] for line in lines] == ["run: 1", "run: 2", "run: 3"]


def test_tokens_are_those_of_the_training_phase_and_of_the_run_before(tmp_path: Path) -> None:
    before = StepMetrics(
        step=4, time=1.0, wall_seconds=100.0, tokens=TokenCounts(generated=1000, rejected=5)
    )
    watched = Watched(tmp_path / "metrics.jsonl", earlier=[before])
    watched.fleet.report(0, TokenCounts(generated=70))  # by the first evaluation
    watched.begin(5)
    watched.fleet.report(0, TokenCounts(generated=100, drafted=40, accepted=20))
    watched.fleet.report(1, TokenCounts(generated=10, verified=3))
    step = watched.finish(5, sent(staleness=StalenessMetrics(mean=0.5, max=1)), TrainerTimes())
    watched.log.close()
    assert step.tokens == TokenCounts(
        generated=1040, drafted=40, accepted=20, verified=3, rejected=5
    )
    assert step.wall_seconds >= 100
    watched.progress.training_ends()
    result = watched.progress.result(None, None, total_seconds=200.0)
    assert result.tokens == step.tokens
    assert result.staleness == StalenessMetrics(mean=0.25, max=1)
    assert not result.exactly_on_policy


def test_a_run_that_is_resumed_without_lenient_reuse_stays_off_policy(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lenient = Watched(path, earlier=[])
    lenient.begin(0)
    for step in range(3):
        lenient.finish(step, LearnerMetrics(exactly_on_policy=False), TrainerTimes())
    lenient.progress.show(lenient.fleet, None)
    assert "| not exactly on-policy |" in " ".join(lenient.said.getvalue().split())
    lenient.log.close()
    resumed = Watched(path, earlier=read_metrics(path))
    resumed.begin(3)
    resumed.finish(3, LearnerMetrics(exactly_on_policy=True), TrainerTimes())
    resumed.progress.show(resumed.fleet, None)
    assert resumed.status()["exactly_on_policy"] is False
    assert resumed.progress.result(None, None, total_seconds=1.0).exactly_on_policy is False
    counts = {of: resumed.gauge("asyncrl_on_policy_steps", exactly=of) for of in ("yes", "no")}
    assert counts == {"yes": 1, "no": 3}
    resumed.progress.rewound(read_metrics(path)[:0], 0)  # every step is trained again
    resumed.finish(0, LearnerMetrics(exactly_on_policy=True), TrainerTimes())
    assert resumed.progress.result(None, None, total_seconds=1.0).exactly_on_policy is True
    resumed.log.close()


def test_status_and_live_view_show_the_last_step(watched: Watched) -> None:
    watched.begin(0)
    watched.fleet.report(0, TokenCounts(generated=100, drafted=40, accepted=20))
    watched.progress.show(watched.fleet, None)
    step = watched.finish(0, sent(), TrainerTimes(wait_seconds=1e9))
    status = watched.status()
    assert status["reward_mean"] == step.learning.reward_mean
    assert status["trainer_idle"] == step.idle.trainer == pytest.approx(1.0)
    assert (status["draft_acceptance"], status["drafted_share"]) == (0.5, 0.2)
    assert msgspec.json.encode(status)
    watched.progress.show(watched.fleet, None)
    assert watched.gauge("asyncrl_samples_total", outcome="trained") == GROUP_SIZE
    assert watched.gauge("asyncrl_samples_total", outcome="failed") == 2 * GROUP_SIZE
    assert watched.gauge("asyncrl_samples_in_flight", state="running") == 5
    assert "drafts accepted 50%" in watched.said.getvalue()


def test_groups_are_counted_over_a_resume(tmp_path: Path) -> None:
    before = [
        StepMetrics(step=0, time=1.0, groups=StepGroups(trained=(0, 1, 2), failed=(3,))),
        StepMetrics(step=1, time=1.0, groups=StepGroups(trained=(4, 5, 6, 7))),
    ]
    watched = Watched(tmp_path / "metrics.jsonl", earlier=before)
    assert watched.status()["groups_trained"] == 7
    watched.begin(2)
    status = watched.status()
    assert (status["groups_trained"], status["groups_failed"]) == (13, 3)
    assert (status["groups_in_flight"], status["groups_delivered"]) == (12, 3)
    watched.progress.training_ends()
    result = watched.progress.result(None, None, total_seconds=1.0)
    assert result.groups == GroupTotals(trained=13, failed=3)
    watched.log.close()


def test_the_record_names_the_groups_trained_on_and_those_that_failed(watched: Watched) -> None:
    watched.begin(0)
    per_step = SchedulerConfig().groups_per_step
    first = per_step  # of step 1
    trained = tuple(range(first + 1, first + per_step - 1))
    manifest = WeightManifest(2, "/nowhere", 0, ())
    for group in (first, first + per_step - 1):
        watched.progress.group_failed(group, "too long")
    watched.progress.step_finished(StepFinished(1, trained, manifest, sent(), TrainerTimes()))
    groups = read_metrics(watched.path)[-1].groups
    assert groups.trained == trained
    assert groups.failed == (first, first + per_step - 1)


def test_terms_and_failures_of_rewards_reach_every_record(tmp_path: Path) -> None:
    earlier = [StepMetrics(step=0, time=1.0, reward_failures={"format": {"raised": 2}})]
    functions = [{"name": "format", "args": {"pattern": "x"}}, {"name": "my.py:score"}]
    watched = Watched(
        tmp_path / "metrics.jsonl", earlier, rewards={"functions": functions, "on_error": "zero"}
    )
    watched.begin(1)
    failed = {"format": {"raised": 1, "timeout": 3}, "score": {"died": 1}}
    watched.fleet.report(0, rewards=RewardCounts(failed=failed, largest={"score": 2e7}))
    watched.fleet.report(1, rewards=RewardCounts(failed={"score": {"died": 4}}))  # a lost one
    for _ in range(2):
        watched.progress.show(watched.fleet, None)
    manifest = WeightManifest(2, "/nowhere", 0, ())
    watched.progress.step_finished(
        StepFinished(1, (0,), manifest, sent(), TrainerTimes(), (0.25, -3.0))
    )
    watched.progress.training_ends()
    watched.log.close()
    step = read_metrics(watched.path)[-1]
    assert step.rewards == {"format": 0.25, "score": -3.0}
    assert step.reward_failures == {"format": {"raised": 3, "timeout": 3}, "score": {"died": 5}}
    result = watched.progress.result(None, None, total_seconds=1.0)
    assert result.reward_failures == step.reward_failures
    assert watched.gauge("asyncrl_reward_term_mean", function="score") == -3.0
    said = " ".join(watched.said.getvalue().split())
    assert said.count("reward 'format' gave no reward (timeout)") == 1
    assert said.count("reward 'score' gave no reward (died)") == 1
    assert said.count("reward 'score' returned 2e+07 (absolute value)") == 1
    assert "11 rewards failed and counted as 0: format: 3 raised, 3 timeout; score: 5 died" in said


def test_the_noise_floor_is_that_of_all_generators_and_of_the_run_before(tmp_path: Path) -> None:
    part = NoiseFloor(samples=4, cut_samples=1, judged=300, rejected=100, abs_mean=1e-3)
    earlier = [StepMetrics(step=0, time=1.0, noise_floor=part)]
    watched = Watched(tmp_path / "metrics.jsonl", earlier)
    watched.begin(1)
    for _ in range(2):  # a generator's report holds all that it has measured
        watched.fleet.report(0, noise_floor=part)
        watched.fleet.report(1, noise_floor=part)  # a lost one
        watched.progress.show(watched.fleet, None)
    for step in (1, 2):
        found = watched.finish(step, sent(), TrainerTimes()).noise_floor
        assert found == part + part + part
        assert (found.judged, found.rejected) == (900, 300)
    watched.log.close()
    said = " ".join(watched.said.getvalue().split())
    assert said.count("rejects 33.3% of the tokens of the very policy that verifies them") == 1


def test_what_verification_will_keep_is_said_before_the_first_step_ends(watched: Watched) -> None:
    watched.begin(0)
    part = NoiseFloor(samples=2, judged=300, abs_mean=0.02, square_mean=1e-3)
    for _ in range(2):
        watched.fleet.report(0, noise_floor=part)
        watched.progress.show(watched.fleet, None)
    said = " ".join(watched.said.getvalue().split())
    assert said.count("80% of those of sampling.max_tokens (256)") == 1


def test_a_finding_is_in_the_record_and_makes_the_run_off_policy(watched: Watched) -> None:
    watched.begin(0)
    fresh = sent(exactly_on_policy=True, staleness=StalenessMetrics())
    first = watched.finish(0, fresh, TrainerTimes())
    wrong = WrongPolicy("kv", "generator-0", 1, "KV of older weights was reused")
    for _ in range(2):
        watched.progress.found(wrong)
    second = watched.finish(1, fresh, TrainerTimes())
    assert (first.wrong_policy, first.exactly_on_policy) == ((), True)
    assert (second.wrong_policy, second.exactly_on_policy) == ((wrong.text,) * 2, False)
    assert watched.said.getvalue().count("WRONG POLICY: KV of older weights") == 1
    watched.progress.training_ends()
    result = watched.progress.result(None, None, total_seconds=1.0)
    assert (result.wrong_policy, result.exactly_on_policy) == ((wrong.text,) * 2, False)


@pytest.mark.parametrize("ends", ["newer weights", "death"])
@pytest.mark.parametrize("cause", ["weights", "tokenizer"])
def test_steps_are_off_policy_until_the_policies_agree_again(
    watched: Watched, cause: Cause, ends: str
) -> None:
    fresh = sent(exactly_on_policy=True, staleness=StalenessMetrics())

    def flag(step: int) -> bool | None:
        return watched.finish(step, fresh, TrainerTimes()).exactly_on_policy

    watched.begin(0)
    watched.progress.installed("generator-0", 0)
    assert flag(0) is True
    watched.progress.found(WrongPolicy(cause, "generator-0", 1, "it has something else"))
    watched.progress.installed("generator-0", 1)  # the version that the finding is about
    watched.progress.installed("generator-1", 2)
    watched.progress.died("generator", "generator-1")
    assert [flag(1), flag(2)] == [False, False]
    if ends == "death":
        watched.progress.died("generator", "generator-0")
    else:
        watched.progress.installed("generator-0", 2)
    agree = ends == "death" or cause == "weights"
    assert flag(3) is agree, "new weights do not make another tokenizer right"
    watched.progress.rewound([], 0)
    again = watched.finish(0, fresh, TrainerTimes())
    assert (again.exactly_on_policy, bool(again.wrong_policy)) == (agree, not agree)


@pytest.mark.parametrize(("action", "expected"), [("warn", False), ("stop", True)])
def test_a_finding_after_the_last_record_is_in_the_result(
    tmp_path: Path, action: str, expected: bool
) -> None:
    """A run that stops has not trained on what was found; one that warns may have."""
    watched = Watched(tmp_path / "metrics.jsonl", [], run={"on_wrong_policy": action})
    watched.begin(0)
    fresh = sent(exactly_on_policy=True, staleness=StalenessMetrics())
    watched.finish(0, fresh, TrainerTimes())
    watched.progress.found(WrongPolicy("kv", "generator-0", 1, "KV of older weights was reused"))
    watched.progress.training_ends()
    result = watched.progress.result(None, None, total_seconds=1.0)
    assert result.exactly_on_policy is expected
    watched.log.close()


def test_rates_are_taken_over_three_seconds_at_least() -> None:
    totals = GenerationTotals(began=0.0)
    totals.update([EngineStats(tokens=TokenCounts(generated=50), busy_seconds=5.0)])
    totals.begin(10.0)
    rates = []
    for second in range(1, 7):
        stats = EngineStats(
            tokens=TokenCounts(generated=50 + 10 * second**2), busy_seconds=5.0 + second / 2
        )
        totals.update([stats])
        rates.append(totals.recent(10.0 + second, 0.25, 0.5))
    assert (rates[0].seconds, rates[0].tokens.generated) == (1.0, 10), "the first step is one"
    assert (rates[-1].seconds, rates[-1].tokens.generated) == (3.0, 360 - 90)
    assert rates[-1].wait_share == pytest.approx(0.25), "in the same time"
    assert rates[-1].reward_share == pytest.approx(0.5)
    assert rates[-1].busy_share == pytest.approx(0.5)
    assert totals.tokens == TokenCounts(generated=360)


def test_records_that_wait_for_the_disk_are_kept_when_a_trainer_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.touch()  # no folder: nothing can be written
    watched = Watched(folder / "metrics.jsonl", [])
    watched.begin(0)
    watched.log.append(StepMetrics(step=0, time=1.0))
    assert watched.progress.has_waiting_records()
    watched.progress.rewound(None, 0)
    folder.unlink()
    assert not watched.progress.has_waiting_records()
    watched.log.close()
    assert [one.step for one in read_metrics(watched.path)] == [0]


SILENT = BatchMetrics(groups=4, zero_variance_groups=4, samples=16)
MASKED = BatchMetrics(groups=4, samples=16, truncated_share=1.0, response_length_mean=256.0)
EQUAL = LearningMetrics(reward_mean=0.5, reward_std=0.0, grad_norm=0.0)
VARIED = LearningMetrics(reward_mean=0.5, reward_std=0.4, grad_norm=0.0)


@pytest.mark.parametrize(
    ("batch", "learning", "words"),
    [
        (SILENT, EQUAL, ["none of its 4 groups carries signal (all samples have the reward 0.5)"]),
        (SILENT, VARIED, ["carries signal (the samples of each have the same reward)"]),
        (
            MASKED,
            VARIED,
            ["mask_truncated_completions leaves these out", "100% of the samples of step 0 were"],
        ),
    ],
)
def test_a_run_that_learns_nothing_says_so(
    tmp_path: Path, batch: BatchMetrics, learning: LearningMetrics, words: list[str]
) -> None:
    watched = Watched(tmp_path / "metrics.jsonl", [], trainer={"mask_truncated_completions": True})
    watched.begin(0)
    for step in range(2):
        watched.finish(step, sent(batch=batch, learning=learning), TrainerTimes())
    watched.progress.training_ends()
    result = watched.progress.result(None, None, total_seconds=1.0)
    watched.log.close()
    said = " ".join(watched.said.getvalue().split())
    for text in ["step 0 learned nothing from its rewards", *words]:
        assert said.count(text) == 1
    assert "2 of 2 steps learned nothing from their rewards" in said
    silent, cut = 2 * batch.zero_variance_groups, 32 if batch is MASKED else 0
    expected = SignalTotals(steps_without=2, groups_without=silent, samples=32, samples_cut=cut)
    assert result.signal == expected


def test_the_head_start_of_a_critic_is_not_a_step_without_signal() -> None:
    step = StepMetrics(step=0, time=0.0, batch=BatchMetrics(groups=4), algorithm={"value_loss": 1})
    assert not step.learned_nothing
    assert msgspec.structs.replace(step, algorithm={}).learned_nothing


def test_steps_with_signal_are_not_warned_about(watched: Watched) -> None:
    watched.begin(0)
    batch = BatchMetrics(groups=4, zero_variance_groups=1, samples=16, truncated_share=0.5)
    watched.finish(0, sent(batch=batch, learning=LearningMetrics(grad_norm=0.1)), TrainerTimes())
    watched.progress.training_ends()
    assert "WARNING" not in watched.said.getvalue()
    assert watched.status()["signalless_share"] == 0.25


def test_slow_rewards_are_named_in_the_wait_and_in_the_step(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("asyncrl.controller.progress.time.monotonic", lambda: clock.now)
    watched.begin(0)
    slow = RewardWait(samples=2, function="judge", seconds=12.0)
    watched.fleet.report(0, reward_wait=slow)
    for _ in range(4):
        clock.now += 2.0
        watched.progress.show(watched.fleet, None)
    assert watched.status()["waiting_for"] == "step 0 waits for the rewards of 2 (judge, 12 s)"
    reason = "the rewards of 2 samples did not come; judge has run for 12 s"
    assert watched.progress.unrewarded() == (2, reason)
    later = RewardWait(step=1, samples=5, seconds=1.0)
    assert slow + later + RewardWait() == slow
    watched.fleet.report(0, reward_wait=later)
    clock.now += 2.0
    watched.progress.show(watched.fleet, None)
    assert watched.progress.unrewarded()[0] == 0, "a later step is not waited for"
    step = watched.finish(0, sent(), TrainerTimes())
    assert step.idle.for_rewards == pytest.approx(0.8)
    watched.progress.show(watched.fleet, None)
    assert "waiting for rewards 80%" in " ".join(watched.said.getvalue().split())


def test_a_paused_run_says_so_first_and_shows_no_old_speeds(watched: Watched) -> None:
    watched.begin(0)
    watched.fleet.report(0, TokenCounts(generated=100, drafted=40, accepted=20))
    watched.finish(0, sent(), TrainerTimes())
    assert watched.status()["eta_seconds"] is not None
    watched.paused = True
    status = watched.status()
    for name in ("eta_seconds", "tokens_per_second", "generator_idle", "trainer_idle"):
        assert status[name] is None
    assert status_lines(status)[0].startswith("run: paused, 1 of ")
