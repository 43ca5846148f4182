"""What the controller answers to users: orders with steps, refusals, and one status for all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from running_training import DIGEST, G, Run

from asyncrl.controller.live_settings import LiveSettings
from asyncrl.controller.scaling import Scaling
from asyncrl.controller.user_requests import UserRequests
from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import events
from asyncrl.steering.user_commands import read_orders
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages import to_trainer as tt
from asyncrl.wire.messages.control import (
    Accepted,
    CheckpointRequest,
    DrainRequest,
    PauseRequest,
    Refused,
    ResumeRequest,
    SetRequest,
    StatusReply,
    StatusRequest,
    StopRequest,
)


class Asked(Run):
    """A run that answers users."""

    def __init__(self, path: Path, **scheduler: Any) -> None:
        super().__init__(path, steps=9, **scheduler)
        self.snapshots = 0
        settings = LiveSettings(
            self.config,
            self.directory,
            self.fleet,
            self.training,
            self.evaluation,
            self.inbox._unfinished,
        )
        self.requests_of_users = UserRequests(
            self.directory,
            self.fleet,
            self.training,
            self.waiter,
            settings,
            Scaling(self.fleet, self.training, self.evaluation),
            self.snapshot,
            self.stop,
        )
        self.inbox._checkpoints.listeners.append(self.requests_of_users.checkpoint_ended)
        self.ask = self.requests_of_users.answer

    def snapshot(self) -> StatusReply:
        self.snapshots += 1
        return StatusReply({"number": self.snapshots})

    async def stop(self, *, drain: bool = False) -> None:
        self.waiter.stop_requested = True
        await self.training.apply(events.DrainRequested() if drain else events.StopRequested())


def test_many_who_ask_get_one_snapshot(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Asked(tmp_path)
        replies = [await run.ask(StatusRequest()) for _ in range(100)]
        assert run.snapshots == len({id(one) for one in replies}), "encoded once as well"
        assert run.snapshots <= 3, "they are asked within a moment"
        assert read_orders(run.directory.path) == []
        snapshots = run.snapshots
        await run.ask(PauseRequest())
        await run.ask(StatusRequest())
        assert run.snapshots == snapshots + 1, "what an order has changed is seen at once"

    asyncio.run(scenario())


def test_pause_and_resume_are_recorded_and_not_given_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Asked(tmp_path)
        assert isinstance(await run.ask(PauseRequest()), Refused), "before training"
        training = await run.begin()
        assert await run.ask(PauseRequest()) == Accepted("the generators pause (from step 0 on)", 0)
        assert "paused already" in (await run.ask(PauseRequest())).reason  # type: ignore[union-attr]
        assert isinstance(await run.ask(ResumeRequest()), Accepted)
        assert await run.ask(ResumeRequest()) == Refused("the run is not paused")
        assert [one.order for one in read_orders(run.directory.path)] == ["pause", "resume"]
        training.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("outcome", ["written", "failed", "lost"])
def test_a_checkpoint_is_acknowledged_when_it_is_on_the_disk(tmp_path: Path, outcome: str) -> None:
    async def scenario() -> None:
        run = Asked(tmp_path)
        assert "trained no step" in (await run.ask(CheckpointRequest())).reason  # type: ignore[union-attr]
        training = await run.begin()
        run.training.trained_steps = 4
        run.hub.take()
        asked = asyncio.create_task(run.ask(CheckpointRequest()))
        await asyncio.sleep(0)
        assert run.hub.take() == [("trainer", tt.WriteCheckpoint())]
        assert "another `checkpoint` is being" in (await run.ask(CheckpointRequest())).reason  # type: ignore[union-attr]
        assert isinstance(await run.ask(StatusRequest()), msgspec.Raw), "and holds up nobody"
        if outcome == "written":
            await run.hear("trainer", ft.CheckpointWritten(4, "/runs/mine/step-000004"))
        elif outcome == "failed":
            await run.hear("trainer", ft.CheckpointFailed(4, "disk_full", "no space left", 5))
        else:
            run.fleet.trainer.is_gone = True
        async with asyncio.timeout(60):
            reply: Any = await asked
        records = read_orders(run.directory.path)
        if outcome == "written":
            expected = "the checkpoint of step 4 is on the disk: /runs/mine/step-000004"
            assert reply == Accepted(expected, 4)
            assert [one.order for one in records] == ["checkpoint"]
        else:
            assert ("no space left" if outcome == "failed" else "was lost") in reply.reason
            assert records == []
        training.cancel()

    asyncio.run(scenario())


def test_a_drain_says_what_is_trained_and_what_is_left_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Asked(tmp_path, on_update="verify", groups_per_step=2)
        training = await run.begin()
        for sample in (SampleId(0, 0), SampleId(0, 1), SampleId(1, 0)):
            await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST))
        reply: Any = await run.ask(DrainRequest())
        assert reply.message.startswith("no new groups are started; training step 0, then writing")
        assert "Left over: 1 begun group(s) that do not fill step 1" in reply.message
        assert reply.step == 1
        for request in (
            DrainRequest(),
            PauseRequest(),
            SetRequest("trainer.learning_rate", "1e-5"),
        ):
            assert "stopping" in (await run.ask(request)).reason  # type: ignore[union-attr]
        assert isinstance(await run.ask(StopRequest()), Accepted), "a drain can be cut short"
        training.cancel()

    asyncio.run(scenario())
