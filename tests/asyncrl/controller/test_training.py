"""From a process's message to the scheduler's command: inbox, training, command executor."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from fake_processes import weights
from hypothesis import given, settings
from hypothesis import strategies as st
from running_training import DIGEST, G, Run, expected, step_finished

from asyncrl.errors import RunFailed, UserError
from asyncrl.rollout.trajectory import SampleId
from asyncrl.runs.directory import read_state
from asyncrl.scheduler.events import PauseRequested, ResumeRequested
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.messages import to_trainer as tt
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused, Reason
from asyncrl.wire.weights.layout import Fingerprint

IMPOSSIBLE = Reason.IMPOSSIBLE_EVENT


ASKED = ("decided", "first_groups")


def test_one_step_from_the_first_request_to_the_end(tmp_path: Path) -> None:
    async def train() -> None:
        run = Run(tmp_path, on_update="keep")
        training = await run.begin()
        samples = (SampleId(0, 0), SampleId(0, 1))
        started = run.hub.take()
        assert [(name, message.sample) for name, message in started] == [(G, s) for s in samples]
        assert len({message.seed for _, message in started}) == 2
        for sample in samples:
            finished = fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST)
            sent = await run.hear(G, finished)
        assert sent == [("trainer", expected(*samples)), (G, tg.Deliver(0, samples))]
        assert await run.hear(G, fg.SampleDelivered(G, samples[0])) == []
        sent = await run.hear(G, fg.SampleDelivered(G, samples[1]))
        assert sent == [("trainer", tt.StepPlan(0, (0,)))]
        step = step_finished(1)
        sent = await run.hear("trainer", step)
        assert sent == [(G, tg.InstallWeights(weights(1)))]
        assert run.training.is_complete
        assert not run.training.is_running
        await asyncio.sleep(0)
        await run.report()
        await training
        assert [name for name, _ in run.progress.calls if name not in ASKED] == [
            "training_begins", "step_finished", "training_ends",
        ]  # fmt: skip

    asyncio.run(train())


def test_new_weights_travel_with_the_verifications_that_they_make_possible(tmp_path: Path) -> None:
    async def train() -> None:
        run = Run(tmp_path, steps=2, on_update="verify")
        training = await run.begin()
        now, ahead = ((SampleId(group, 0), SampleId(group, 1)) for group in (0, 1))
        run.hub.take()
        for sample in (*now, *ahead):
            await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST))
        for sample in now:
            await run.hear(G, fg.SampleDelivered(G, sample))
        sent = await run.hear("trainer", step_finished(1))
        verify = run.requests.verify(ahead, 1)
        assert sent == [(G, tg.InstallWeights(weights(1), verify=(verify,)))]
        for sample in ahead:  # verified before the generator has compared the weights
            sent = await run.hear(G, fg.SampleFinished(G, sample, 5, 1, "stop", DIGEST))
        assert sent[-1] == (G, tg.Deliver(1, ahead))
        assert await run.hear(G, fg.WeightsInstalled(G, 1)) == []
        training.cancel()

    asyncio.run(train())


def test_pausing_reaches_the_generators(tmp_path: Path) -> None:
    async def pause() -> None:
        run = Run(tmp_path)
        await run.training.apply(PauseRequested())
        assert run.hub.take() == [], "there is no scheduler yet"
        training = await run.begin()
        run.hub.take()
        await run.training.apply(PauseRequested())
        assert run.hub.take() == [(G, tg.Pause())]
        await run.training.apply(ResumeRequested())
        assert run.hub.take() == [(G, tg.Resume())]
        training.cancel()

    asyncio.run(pause())


def test_a_failed_group_is_reported_and_a_user_error_ends_the_run(tmp_path: Path) -> None:
    async def fail() -> None:
        run = Run(tmp_path)
        training = await run.begin()
        failed = fg.SampleFailed(G, SampleId(0, 1), "too long", user_error=False)
        await run.hear(G, failed)
        assert run.progress.said == [
            "group 0 is not trained on: sample 0.1 of generator-0: too long"
        ]
        await run.hear(G, fg.Failure(G, "a reward raised", user_error=True))
        with pytest.raises(UserError, match="a reward raised"):
            await training
        assert run.fleet.generators()[0].reason == "a reward raised"

    asyncio.run(fail())


def test_unknown_senders_and_messages_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def confuse() -> None:
        run = Run(tmp_path)
        assert await run.hear("stranger", fg.Goodbye(G)) == []
        step = step_finished(9)
        assert await run.hear(G, step) == []
        assert run.fleet.weights == weights(0), "a generator publishes no weights"

    asyncio.run(confuse())
    assert "from 'stranger' (unknown_peer): Goodbye from an unknown process" in caplog.text


NEVER_ISSUED, OURS = SampleId(9, 0), SampleId(0, 0)


@pytest.mark.parametrize(
    "message",
    [
        fg.SampleFinished(G, NEVER_ISSUED, 5, 0, "stop", DIGEST),
        fg.SampleFinished(G, SampleId(0, 7), 5, 0, "stop", DIGEST),
        fg.SampleFailed(G, NEVER_ISSUED, "no reason", user_error=False),
        fg.SampleDelivered(G, NEVER_ISSUED),
        fg.SampleDelivered(G, OURS),
        fg.GeneratorReady(G, 3, 0, Fingerprint({}, "")),
        fg.EvaluationSample(G, 0, 10**12, 1.0, 0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_impossible_event_is_refused_and_the_run_continues(tmp_path: Path, message: Any) -> None:
    async def check() -> None:
        run = Run(tmp_path, on_update="keep")
        refused: list[Reason] = []
        run.hub.refusals.count = refused.append
        training = await run.begin()
        run.hub.take()
        assert await run.hear(G, message) == []
        assert refused == ([] if isinstance(message, fg.EvaluationSample) else [IMPOSSIBLE])
        for sample in (OURS, SampleId(0, 1)):
            sent = await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST))
        samples = (OURS, SampleId(0, 1))
        assert sent == [("trainer", expected(*samples)), (G, tg.Deliver(0, samples))]
        assert not training.done()
        training.cancel()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("sender", "message", "reason"),
    [
        (G, fg.SampleFinished(G, OURS, 5, 7, "stop", DIGEST), "tokens of policy version 7"),
        (G, fg.WeightsInstalled(G, 7), "installed policy version 7, which was never published"),
        ("trainer", step_finished(1), "step 0 cannot have been trained yet"),
    ],
)
def test_a_process_that_contradicts_the_run_is_killed(
    tmp_path: Path, sender: str, message: Any, reason: str
) -> None:
    async def check() -> None:
        run = Run(tmp_path, on_update="keep")
        training = await run.begin()
        await run.hear(sender, message)
        ((worker, cause),) = run.fleet.deaths()
        assert worker.name == sender
        assert reason in cause
        assert not training.done()
        training.cancel()

    asyncio.run(check())


def test_a_refused_delivery_fails_its_group_with_the_reason(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, on_update="keep")
        training = await run.begin()
        for sample in (OURS, SampleId(0, 1)):
            await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST))
        refused = ft.DeliveryRefused(G, OURS, "bad")
        sent = await run.hear("trainer", refused)
        assert sent == [(G, tg.Discard((OURS, SampleId(0, 1))))]
        assert run.progress.said == [
            f"group 0 is not trained on: sample 0.0 of {G}: trainer refused its delivery: bad"
        ]
        assert await run.hear("trainer", refused) == [], "a generator may send it again"
        training.cancel()

    asyncio.run(check())


def test_a_generator_that_joins_with_unpublished_weights_is_killed(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path)
        run.fleet.generators()[0].policy_version = 7
        training = await run.begin()
        ((worker, cause),) = run.fleet.deaths()
        assert (worker.name, "policy version 7" in cause) == (G, True)
        assert not training.done()
        training.cancel()

    asyncio.run(check())


def test_a_defect_in_the_scheduler_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        run = Run(tmp_path)
        training = await run.begin()
        scheduler: Any = run.training._scheduler
        monkeypatch.setattr(scheduler, "on_event", {}.__getitem__)
        with pytest.raises(RunFailed, match="could not handle SampleDelivered, which is a defect"):
            await run.hear(G, fg.SampleDelivered(G, OURS))
        training.cancel()

    asyncio.run(check())


def test_no_message_of_any_content_breaks_the_inbox(tmp_path: Path) -> None:
    unions = (fg.FromGenerator, ft.FromTrainer)
    generator, trainer = (FrameDecoder(union, max_bytes=999) for union in unions)
    small = st.integers(-2, 3) | st.sampled_from([2**31, 2**63])
    sample = st.fixed_dictionaries({"group": small, "sample": small})
    values = st.text(max_size=3) | st.booleans() | small | st.floats() | sample | st.none()
    kinds = [*get_args(fg.FromGenerator), *get_args(ft.FromTrainer)]

    @settings(max_examples=300)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(kinds))
        fields = {name: data.draw(values) for name in kind.__struct_fields__}
        fields |= {"generator": G, "sample": data.draw(sample)} | {"user_error": False}
        body = msgspec.msgpack.encode({"type": kind.__struct_config__.tag, **fields})
        with contextlib.suppress(FrameRefused):
            loop.run_until_complete(run.inbox.handle(G, generator.decode(body)))
        with contextlib.suppress(FrameRefused):
            loop.run_until_complete(run.inbox.handle("trainer", trainer.decode(body)))
        assert not training.done()

    with asyncio.Runner() as runner:
        loop, run = runner.get_loop(), Run(tmp_path)
        training = loop.run_until_complete(run.begin())
        check()
        training.cancel()


def test_a_new_generator_is_recorded_and_gets_the_weights_that_are_evaluated(
    tmp_path: Path,
) -> None:
    async def join() -> None:
        run = Run(tmp_path, version=3)
        measuring = asyncio.create_task(run.evaluation.measure(0))
        await asyncio.sleep(0)
        assert [message.index for _, message in run.hub.take()] == [0, 1, 2]
        await run.evaluation.lost(run.fleet.generators()[0])
        run.hub.take()
        ready = fg.GeneratorReady(G, 2, 0, Fingerprint({}, ""), metrics_port=4321)
        assert await run.hear(G, ready) == [(G, tg.InstallWeights(weights(3)))]
        state = read_state(run.directory.path)
        assert state is not None
        assert state.metrics_ports == {G: 4321}
        await run.hear("trainer", ft.TrainerReady(0, weights(0), 4322))
        state = read_state(run.directory.path)
        assert state is not None
        assert state.metrics_ports == {G: 4321, "trainer": 4322}, "although it came last"
        measuring.cancel()

    asyncio.run(join())


def test_an_evaluation_counts_each_sample_once_and_only_of_its_weights(tmp_path: Path) -> None:
    async def evaluate() -> None:
        run = Run(tmp_path, version=3)
        measuring = asyncio.create_task(run.evaluation.measure(0))
        await asyncio.sleep(0)
        asked = [message for _, message in run.hub.take()]
        assert [(message.index, message.prompt.prompt_id) for message in asked] == [
            (0, "held-out-0"), (1, "held-out-1"), (2, "held-out-2"),
        ]  # fmt: skip
        old = await run.hear(G, fg.EvaluationSample(G, 0, 0, 1.0, 2))
        assert [message.index for _, message in old] == [0], "asked for again"
        for index, reward in ((0, 1.0), (1, 0.0), (2, 1.0)):
            await run.hear(G, fg.EvaluationSample(G, 0, index, reward, 3))
        record = await measuring
        assert record is not None
        assert (record.step, record.when, record.main.samples) == (3, "before", 3)
        assert record.main.accuracy == pytest.approx(2 / 3)
        late = fg.EvaluationSample(G, 0, 0, 1.0, 3)
        assert await run.hear(G, late) == [], "the round is over"

    asyncio.run(evaluate())


def test_a_stop_ends_an_evaluation_without_a_result(tmp_path: Path) -> None:
    async def stop() -> None:
        run = Run(tmp_path)
        measuring = asyncio.create_task(run.evaluation.measure(0))
        await asyncio.sleep(0)
        run.waiter.stop_requested = True
        run.waiter.notify()
        assert await measuring is None
        await run.training.run()
        assert not run.training.has_begun, "a stop before training leaves it out"

    asyncio.run(stop())
