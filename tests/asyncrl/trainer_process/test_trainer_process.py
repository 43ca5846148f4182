"""The trainer process with a fake learner: which groups a step trains on, and what is saved."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from deliveries_of import delivery_of, order_of
from trainer_harness import GROUP_SIZE, FakeLearner, FakeTokenizer, TrainerHarness, play
from turns_of import Row, trajectory_of

from asyncrl.config.run_section import RunSection
from asyncrl.errors import AsyncrlError, first_error
from asyncrl.monitoring.metrics.metrics import TrainerMetrics, new_registry
from asyncrl.monitoring.records.trained_samples import read_trained_samples
from asyncrl.rollout.trajectory import SampleId
from asyncrl.trainer.objective.logprob_mismatch import SUMS
from asyncrl.trainer_process.delivery_check import EARLY_BYTES, WholeGroup
from asyncrl.trainer_process.sample_log import TrainedSampleLog, drop_repeated
from asyncrl.wire.messages import from_trainer, to_trainer
from asyncrl.wire.records.wrong_policy import WrongPolicy
from asyncrl.wire.transport.refusals import Limit, Refusals
from asyncrl.wire.weights.fingerprint import fingerprint


def test_a_step_is_taken_when_the_groups_of_its_plan_are_accumulated(tmp_path: Path) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(1, step=0)
        harness.deliver(2, step=1)  # waits for its step
        harness.deliver(0, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0, 1)))
        (ready,) = await harness.sent(from_trainer.TrainerReady, 1)
        assert ready.initial_weights == FakeLearner.initial_weights
        (finished,) = await harness.sent(from_trainer.StepFinished, 1)
        assert (finished.step, finished.groups) == (0, (0, 1))
        assert len(finished.shown) == 3, "run.print_samples, of both groups"
        assert all(one.tokens and one.response and one.prompt for one in finished.shown)
        assert finished.manifest.policy_version == 1
        held_by_an_engine = torch.ones(3, dtype=torch.bfloat16)
        assert finished.manifest.fingerprint == fingerprint([("w", held_by_an_engine)])

    harness = play(tmp_path, scenario)
    assert [sorted(groups) for groups in harness.learner.groups] == [[0, 1], [2]]
    assert len(harness.hub.acknowledged) == 3 * GROUP_SIZE
    assert isinstance(harness.control.sent[-1], from_trainer.Goodbye)


@pytest.mark.parametrize(
    ("follow", "staleness", "expected"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_each_step_says_whether_it_was_exactly_on_policy(
    tmp_path: Path,
    follow: bool,
    staleness: int,
    expected: bool,
) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.learner.staleness = staleness
        harness.deliver(0, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0,)))
        (finished,) = await harness.sent(from_trainer.StepFinished, 1)
        assert finished.metrics.exactly_on_policy is expected

    play(tmp_path, scenario, samples_follow_policy=follow)


def test_a_repeatable_run_accumulates_groups_in_order(tmp_path: Path) -> None:
    """Whatever the order of arrival; a failed group is skipped once the plan says so."""

    async def scenario(harness: TrainerHarness) -> None:
        for group in (1, 2, 0):
            harness.deliver(group, step=group // 2)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0, 1)))
        await harness.sent(from_trainer.StepFinished, 1)
        harness.deliver(5, step=2)
        harness.deliver(3, step=1)
        for step, groups in ((1, (2, 3)), (2, (5,))):
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, groups))
        await harness.sent(from_trainer.StepFinished, 3)

    harness = play(tmp_path, scenario, in_order=True)
    assert harness.learner.groups == [[0, 1], [2, 3], [5], []]


def test_the_terms_of_a_steps_rewards_are_averaged_over_the_samples_that_have_them(
    tmp_path: Path,
) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        terms = ((0.5, 1.0), (), (1.0, 0.0), (0.0, 0.5))  # the second reward failed
        for index, each in enumerate(terms):
            sample = SampleId(index // GROUP_SIZE, index % GROUP_SIZE)
            delivery = delivery_of(sample, terms=each)
            harness.control.inbox.put_nowait(order_of("g0", delivery))
            harness.hub.inbox.put_nowait(("g0", delivery))
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0, 1)))
        harness.deliver(2, step=1)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(1, (2,)))
        first, second = await harness.sent(from_trainer.StepFinished, 2)
        assert first.reward_terms == (0.5, 0.5)
        assert second.reward_terms == ()

    play(tmp_path, scenario)


def test_checkpoints_are_written_when_due_and_once_per_version(tmp_path: Path) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        for step in range(2):
            harness.deliver(step, step=step)
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, (step,)))
        (written,) = await harness.sent(from_trainer.CheckpointWritten, 1)
        assert written == from_trainer.CheckpointWritten(2, str(tmp_path / "step-000002"))

    harness = play(tmp_path, scenario, checkpoint=True)
    assert harness.learner.saved == [tmp_path / "step-000002"]


@pytest.mark.parametrize("answers", ["while it trains", "at the end"])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, answers: str) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.learner.disk_answers.clear()
        for step in range(3):
            harness.deliver(step, step=step)
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, (step,)))
        await harness.sent(from_trainer.StepFinished, 3)
        assert harness.learner.saved == []
        if answers == "at the end":
            asyncio.get_running_loop().call_later(0.1, harness.learner.disk_answers.set)
            return
        harness.learner.disk_answers.set()
        (written,) = await harness.sent(from_trainer.CheckpointWritten, 1)
        assert written.policy_version == 2

    harness = play(tmp_path, scenario, checkpoint=True)
    assert harness.learner.attempts == [2, 3]
    assert harness.learner.saved_steps == [[0, 1], [2]], "of the version that it holds"
    sent = [one for one in harness.control.sent if isinstance(one, from_trainer.CheckpointWritten)]
    assert [one.policy_version for one in sent] == [2, 3]
    assert isinstance(harness.control.sent[-1], from_trainer.Goodbye)


def test_a_shutdown_with_checkpoint_saves_a_version_that_is_not_due(tmp_path: Path) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(0, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0,)))
        await harness.sent(from_trainer.StepFinished, 1)

    assert play(tmp_path, scenario).learner.saved == []
    assert play(tmp_path, scenario, checkpoint=True).learner.saved == [tmp_path / "step-000001"]


def test_training_continues_on_a_full_disk_and_checkpoints_are_tried_again(
    tmp_path: Path,
) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.learner.disk_is_full = lambda version: version != 12
        for step in range(13):
            harness.deliver(step, step=step)
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, (step,)))
        await harness.sent(from_trainer.StepFinished, 13)

    harness = play(tmp_path, scenario, checkpoint=True, every=4, asynchronous=False)
    # Due at 4; then after 1, 2, 4 and at most 4 steps, and when due.
    assert harness.learner.attempts == [4, 5, 7, 8, 12, 13]
    assert harness.learner.saved == [tmp_path / "step-000012"]
    assert harness.learner.saved_steps == [list(range(12))], "those of failed attempts too"
    failed = [one for one in harness.control.sent if isinstance(one, from_trainer.CheckpointFailed)]
    assert [one.retry_version for one in failed] == [5, 7, 11, 12, 14]
    assert failed[-1].policy_version == 13, "the last state, at the end"
    assert isinstance(harness.control.sent[-1], from_trainer.Goodbye)


def test_training_continues_while_a_checkpoint_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named and given up; no other is begun before the disk answers."""

    async def scenario(harness: TrainerHarness) -> None:
        async def train(step: int) -> None:
            harness.deliver(step, step=step)
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, (step,)))
            await harness.sent(from_trainer.StepFinished, step + 1)

        harness.learner.disk_answers.clear()
        await train(0)
        first = await harness.sent(from_trainer.CheckpointFailed, 1)
        await train(1)
        second = (await harness.sent(from_trainer.CheckpointFailed, 2))[1]
        assert harness.learner.attempts == [1]
        assert (first[0].cause, first[0].policy_version) == ("hanging", 1)
        assert f"{tmp_path / 'step-000001'} cannot be written: the disk has not" in first[0].reason
        assert f"finished writing {tmp_path / 'step-000001'} for" in second.reason
        harness.learner.disk_answers.set()
        hanging = [one for one in threading.enumerate() if one.name == "checkpoint"]
        for one in hanging:
            await asyncio.to_thread(one.join, 10)
        await train(2)
        (written,) = await harness.sent(from_trainer.CheckpointWritten, 1)
        assert written.policy_version == 3

    harness = play(tmp_path, scenario, every=1, limit=0.2)
    assert harness.learner.saved == [tmp_path / "step-000003"]
    assert harness.learner.saved_steps == [[0, 1, 2]]
    gc.collect()
    assert "never retrieved" not in caplog.text, "the late end of the hanging one"


def test_a_group_that_is_reported_as_failed_after_its_gradient_ends_the_run(
    tmp_path: Path,
) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(0, step=0)
        await asyncio.to_thread(harness.learner.added.wait, 10)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (1,)))
        await asyncio.wait([harness.running])

    with pytest.raises(BaseExceptionGroup) as caught:
        play(tmp_path, scenario)
    error = first_error(caught.value)
    assert isinstance(error, AsyncrlError)
    assert "[0]" in str(error)


def test_a_delivery_that_is_refused_is_reported_and_the_others_are_trained_on(
    tmp_path: Path,
) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        ordered = delivery_of(SampleId(0, 0))
        forged = msgspec.structs.replace(ordered, tokens=bytes(ordered.tokens)[::-1])
        for peer, delivery in (("g1", ordered), ("g0", forged)):
            harness.hub.inbox.put_nowait((peer, delivery))
        await harness.until(harness.hub.inbox.empty)
        harness.control.inbox.put_nowait(order_of("g0", ordered))
        await harness.until(lambda: harness.hub.asked == [SampleId(0, 0)])  # it came too early
        harness.hub.inbox.put_nowait(("g0", forged))
        (refused,) = await harness.sent(from_trainer.DeliveryRefused, 1)
        assert (refused.generator, refused.sample) == ("g0", SampleId(0, 0))
        harness.deliver(1, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (1,)))
        await harness.sent(from_trainer.StepFinished, 1)

    harness = play(tmp_path, scenario)
    assert harness.learner.groups == [[1], []]
    assert harness.hub.acknowledged == [SampleId(1, 0), SampleId(1, 1)]


@pytest.mark.parametrize("room", [EARLY_BYTES, 1], ids=["room", "no room"])
def test_deliveries_before_their_orders_are_trained_on_and_nobody_is_blamed(
    tmp_path: Path, room: int
) -> None:
    """As when the trainer's control connection stalls for any time."""

    async def scenario(harness: TrainerHarness) -> None:
        samples = [SampleId(group, one) for group in range(2) for one in range(2)]
        deliveries = [delivery_of(one) for one in samples]
        harness.hub.refusals = Refusals(limit=Limit(0, 600.0))
        cut_off: list[str] = []
        harness.hub.refusals.on_cut_off = lambda name, _: cut_off.append(name)
        for _ in range(20):  # each is sent again until it is acknowledged
            for delivery in deliveries:
                harness.hub.inbox.put_nowait(("g0.1", delivery))
        await harness.until(harness.hub.inbox.empty)
        harness.control.inbox.put_nowait(order_of("g0", *deliveries))  # of a lost generator
        harness.control.inbox.put_nowait(to_trainer.Withdraw("g0"))
        harness.control.inbox.put_nowait(order_of("g0.1", *deliveries))
        hub = harness.hub
        await harness.until(lambda: len(hub.asked) + len(hub.acknowledged) == len(samples))
        assert harness.hub.asked == (samples if room == 1 else [])
        for delivery in deliveries if room == 1 else []:
            harness.hub.inbox.put_nowait(("g0.1", delivery))
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0, 1)))
        await harness.sent(from_trainer.StepFinished, 1)
        assert not cut_off
        assert not any(
            isinstance(one, from_trainer.PeerCutOff | from_trainer.DeliveryRefused)
            for one in harness.control.sent
        )

    harness = play(tmp_path, scenario, early_bytes=room)
    assert sorted(harness.learner.groups[0]) == [0, 1]


def test_each_trained_sample_is_logged_once_and_before_its_checkpoint(tmp_path: Path) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(7, step=2)  # arrives before its step, which is never trained
        for step in range(2):
            harness.deliver(step, step=step, terms=(0.25, 1.0))
            harness.deliver(step, step=step, terms=(0.25, 1.0))  # sent again
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, (step,)))
        await harness.sent(from_trainer.CheckpointWritten, 1)

    harness = play(tmp_path, scenario)
    records = list(read_trained_samples(tmp_path / "samples"))
    assert [(one.step, one.group, one.sample) for one in records] == [
        (0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert harness.learner.logged_at_save == 4
    last = records[-1]
    assert (last.prompt, last.response) == ("bc", "d?b")
    assert (last.prompt_tokens, last.response_tokens) == ([1, 2], [3, 4, 1])
    assert (last.provenance, len(last.behaviour_logprobs or ())) == ("000", 3)
    assert (last.sampled, last.generator, last.segments[0].policy_version) == (3, "g0", 0)
    assert last.rewards == {"score": 0.25, "environment": 1.0}
    assert last.observed_at == []


def test_a_logged_sample_says_which_tokens_are_an_environments(tmp_path: Path) -> None:
    row = Row(np.array([1]), np.arange(2, 9), np.array([1, 0, 0, 1, 1, 0, 1], bool))
    sample = trajectory_of(SampleId(0, 0), [row], np.full(4, -1.0))
    group = WholeGroup(0, [sample], np.zeros(1, np.float32), ["g0"], [()])
    metrics = TrainerMetrics.register(new_registry(), "trainer")
    log = TrainedSampleLog(tmp_path, FakeTokenizer(), RunSection(), metrics)

    async def write() -> None:
        await log.record(0, [group])
        await log.close()

    asyncio.run(write())
    (record,) = read_trained_samples(tmp_path)
    assert (record.observed, record.observed_at) == (3, [(1, 3), (5, 6)])


def test_a_sample_log_without_a_disk_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")

    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(0, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0,)))
        await harness.sent(from_trainer.StepFinished, 1)

    harness = play(tmp_path, scenario)
    labels = {"process": "trainer"}
    lost = harness.registry.get_sample_value("asyncrl_unlogged_samples_total", labels)
    assert lost == GROUP_SIZE


def test_samples_that_cannot_be_dropped_do_not_end_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "000001.jsonl").mkdir()  # cannot be opened as a file
    drop_repeated(tmp_path, 3)
    assert "step 3 and later steps could not be dropped" in caplog.text
    assert "Is a directory" in caplog.text


class SuspiciousCheck:
    """Finds something wrong with step 0."""

    follows = False

    def __init__(self, *, provisional: bool = False) -> None:
        self.seen: list[int] = []
        self._provisional = provisional

    def add(self, group: WholeGroup, rows: np.ndarray) -> None:
        assert rows.shape == (GROUP_SIZE, SUMS)
        self.seen.append(group.group)

    def findings(self, version: int) -> list[from_trainer.WrongPolicyFound]:
        wrong = WrongPolicy("temperature", "g0", version, "it samples at another temperature")
        found = from_trainer.WrongPolicyFound(wrong, provisional=self._provisional)
        return [found] if version == 0 else []


@pytest.mark.parametrize(("stops", "provisional"), [(True, False), (True, True), (False, False)])
def test_a_step_with_tokens_of_another_policy_is_not_trained(
    tmp_path: Path, *, stops: bool, provisional: bool
) -> None:
    check, ends = SuspiciousCheck(provisional=provisional), stops and not provisional

    async def scenario(harness: TrainerHarness) -> None:
        for group in (0, 1):
            harness.deliver(group, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0, 1)))
        (found,) = await harness.sent(from_trainer.WrongPolicyFound, 1)
        assert (found.found.cause, found.found.policy_version) == ("temperature", 0)
        if not ends:
            (finished,) = await harness.sent(from_trainer.StepFinished, 1)
            assert finished.metrics.exactly_on_policy is False

    harness = play(tmp_path, scenario, checkpoint=True, check=check, stops=stops)
    assert sorted(check.seen) == [0, 1]
    assert harness.learner.policy_version == (0 if ends else 1)
    finished = [one for one in harness.control.sent if isinstance(one, from_trainer.StepFinished)]
    assert len(finished) == (not ends)
    saved = [path.name for path in harness.learner.saved]
    assert saved == ([] if ends else ["step-000001"]), "nothing was trained that could be saved"
    assert isinstance(harness.control.sent[-1], from_trainer.Goodbye)
