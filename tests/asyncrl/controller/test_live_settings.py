"""`asyncrl set`: from which step on a setting holds, who is told, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_processes import run_config, weights
from running_training import DIGEST, G, Run, step_finished

from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.controller.live_settings import LiveSettings
from asyncrl.mutability import LIVE
from asyncrl.rollout.trajectory import SampleId
from asyncrl.steering.user_commands import Orders, read_orders, with_orders
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.messages import to_trainer as tt
from asyncrl.wire.messages.control import Accepted, Refused, SetRequest
from asyncrl.wire.weights.layout import Fingerprint

PAGE = Path(__file__).parents[3] / "docs/operate.md"
VERIFY = {"on_update": "verify", "max_runahead_groups": 1}


class Steered(Run):
    """A run whose settings can be changed."""

    def __init__(self, path: Path, steps: int = 9, **scheduler: Any) -> None:
        super().__init__(path, steps=steps, **scheduler)
        self.settings = LiveSettings(
            self.config,
            self.directory,
            self.fleet,
            self.training,
            self.evaluation,
            self.inbox._unfinished,
        )
        self.inbox._settings = self.settings
        self.orders = Orders(
            self.directory.path, lambda: self.training.trained_steps, lambda _: None
        )
        self.orders.add(SetRequest, self.settings.carry_out)

    async def set(self, key: str, value: str) -> Any:
        return await self.orders.answer(SetRequest(key, value))

    async def trains(self) -> list[Any]:
        """One step from its first sample to its end, and what is sent meanwhile."""
        step, sent = self.training.trained_steps, []
        for event in (
            lambda one: fg.SampleFinished(G, one, 5, step, "stop", DIGEST),
            lambda one: fg.SampleDelivered(G, one),
        ):
            for sample in (SampleId(step, 0), SampleId(step, 1)):
                sent += await self.hear(G, event(sample))
        finished = step_finished(step + 1)

        finished = msgspec.structs.replace(finished, step=step, groups=(step,))
        sent += await self.hear("trainer", finished)
        sent += await self.hear(G, fg.WeightsInstalled(G, step + 1))
        return [message for _, message in sent]


def told(sent: list[tuple[str, Any]]) -> RunConfig:
    """The configuration that the trainer was told."""
    (message,) = [one for name, one in sent if isinstance(one, tt.Configure)]
    return run_config(**json.loads(message.config_json))


def same(one: RunConfig, other: RunConfig) -> bool:
    return all(one.at(step) == other.at(step) for step in range(one.run.steps))


def test_a_learning_rate_holds_from_the_first_step_that_was_not_planned(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Steered(tmp_path)
        training = await run.begin()
        run.hub.take()
        for sample in (SampleId(0, 0), SampleId(0, 1)):
            await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST))
        assert (await run.set("trainer.learning_rate", "1e-5")).step == 0, "nothing is planned"
        run.hub.take()
        await run.hear(G, fg.SampleDelivered(G, SampleId(0, 0)))
        sent = await run.hear(G, fg.SampleDelivered(G, SampleId(0, 1)))
        assert sent == [("trainer", tt.StepPlan(0, (0,)))]
        reply = await run.set("trainer.learning_rate", "2e-5")
        assert reply == Accepted("trainer.learning_rate is 2e-05 from step 1 on", 1)
        config = told(run.hub.take())
        assert ConfigByStep(config).peak_rates == {0: 1e-5, 1: 2e-5}
        assert load_config(run.directory.path / "config.yaml") == config, "for the next trainer"
        assert same(with_orders(run.config, []), config), "also from a checkpoint before step 1"
        rate = run.config.trainer.learning_rate
        assert [one.before for one in read_orders(run.directory.path)] == [rate, rate]
        again = with_orders(config, [f"trainer.learning_rate={rate}"])
        assert same(again, config), "the command of the first start is repeated"
        training.cancel()

    asyncio.run(scenario())


def test_the_staleness_bound_holds_from_the_first_step_that_is_not_begun(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Steered(tmp_path)
        training = await run.begin()
        run.hub.take()
        assert (await run.set("scheduler.max_off_policy_steps", "2")).step == 1
        sent = await run.trains()
        begun = [one.sample.group for one in sent if isinstance(one, tg.Generate)]
        assert begun == [1, 1, 2], "as many as it has room for; steps 1 to 3 are open"
        assert (await run.set("scheduler.max_off_policy_steps", "0")).step == 4
        assert (await run.set("scheduler.sample_deadline_seconds", "5")).step == 4
        config = run.settings.config
        assert [config.at(step).scheduler.max_off_policy_steps for step in range(6)] == [
            0,
            2,
            2,
            2,
            0,
            0,
        ]
        assert [config.at(step).samples_follow_policy for step in (3, 4)] == [True, False]
        assert same(with_orders(run.config, []), config)
        training.cancel()

    asyncio.run(scenario())


def test_a_run_without_verification_refuses_it_and_one_with_it_leaves_and_returns(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        kept = Steered(tmp_path / "kept")
        assert "began without it" in (await kept.set("scheduler.on_update", "verify")).reason
        run = Steered(tmp_path / "verified", **VERIFY)
        reply = await run.set("scheduler.on_update", "recompute")
        assert reply == Accepted("scheduler.on_update is recompute from step 0 on", 0)
        at = run.settings.config.at(0).scheduler
        assert (at.on_update, at.max_runahead_groups) == ("recompute", "auto")
        assert run.training.verifies, "what is in flight can be verified"
        assert isinstance(await run.set("scheduler.on_update", "verify"), Accepted)
        assert with_orders(run.config, []).at(5).scheduler.on_update == "verify"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("trainer.lerning_rate", "1", "there is no setting 'trainer.lerning_rate'. Did you mean"),
        ("learning_rate", "1", "Did you mean 'trainer.learning_rate'?"),
        ("trainer", "1", "trainer is a section"),
        ("trainer.learning_rate", "2", "trainer.learning_rate: must be less than or equal to 1"),
        ("trainer.learning_rate", "[", "the value of trainer.learning_rate"),
        ("trainer.learning_rate", "true", "must be a number"),
        ("scheduler.on_update", "kept", "must be 'verify', 'keep' or 'recompute'"),
        ("scheduler.max_runahead_groups", "4", "needs scheduler.on_update: verify, not keep"),
        ("scheduler.group_size", "4", "which samples belong to a group depends on it. Start a new"),
        ("engine.kind", "vllm", "the engines were started with it. Stop the run (`asyncrl stop"),
        ("launcher.generators", "3", "Use `asyncrl scale --generators N`"),
        ("run.steps", "99", "continue it with `--resume --set run.steps=VALUE`"),
        ("launcher.silence_seconds", "-1", "launcher.silence_seconds: must be greater than 0"),
    ],
)
def test_what_cannot_be_set_is_refused_and_leaves_no_trace(
    tmp_path: Path, key: str, value: str, reason: str
) -> None:
    run = Steered(tmp_path)
    before = (run.directory.path / "config.yaml").read_text()
    reply = asyncio.run(run.set(key, value))
    assert isinstance(reply, Refused)
    assert reason in reply.reason
    assert run.settings.config == run.config
    assert run.hub.take() == []
    assert read_orders(run.directory.path) == []
    assert (run.directory.path / "config.yaml").read_text() == before


def test_a_limit_holds_at_once_and_in_a_resumed_run(tmp_path: Path) -> None:
    run = Steered(tmp_path)
    reply = asyncio.run(run.set("launcher.silence_seconds", "7"))
    assert reply == Accepted("launcher.silence_seconds is 7.0 from now on", 0)
    assert run.fleet.config.silence_seconds == 7
    assert with_orders(run.config, []).launcher.silence_seconds == 7
    (order,) = read_orders(run.directory.path)
    assert order.before == run.config.launcher.silence_seconds
    assert asyncio.run(run.set("monitoring.log_level", "debug")) is not None
    assert (G, tg.SetLogLevel("debug")) in run.hub.take()


def test_a_generator_that_joins_later_has_the_level_of_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Steered(tmp_path)
        joined = fg.GeneratorReady(G, 2, 0, Fingerprint({}, ""), None)
        level = (G, tg.SetLogLevel("debug"))
        assert level not in await run.hear(G, joined)
        await run.set("monitoring.log_level", "debug")
        run.hub.take()
        assert level in await run.hear(G, joined)

    asyncio.run(scenario())


def test_a_trainer_that_replaces_another_is_told_before_it_can_train(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Steered(tmp_path)
        await run.set("trainer.learning_rate", "1e-5")
        training = await run.begin()
        run.hub.take()
        sent = await run.hear("trainer", ft.TrainerReady(0, weights(0)))
        assert isinstance(sent[0][1], tt.Configure)
        training.cancel()

    asyncio.run(scenario())


def test_no_step_is_left_to_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Steered(tmp_path, steps=1)
        training = await run.begin()
        reply = await run.set("scheduler.max_off_policy_steps", "1")
        assert "from step 1 on, and the run has 1 steps" in reply.reason
        training.cancel()

    asyncio.run(scenario())


def test_the_page_lists_every_setting() -> None:
    page = PAGE.read_text()
    assert [key for key in LIVE if f"`{key}`" not in page] == []
