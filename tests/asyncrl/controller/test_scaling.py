"""`asyncrl scale`: generators join and leave, and the order is recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_processes import run_config
from running_training import DIGEST, G, Run

from asyncrl.config.run_config import dump_config
from asyncrl.controller.scaling import Scaling
from asyncrl.controller.unfinished_work import SampleHandover
from asyncrl.monitoring.report.data import load_run
from asyncrl.monitoring.report.sections import orders
from asyncrl.rollout.trajectory import KeptTokens, SampleId
from asyncrl.scheduler import events
from asyncrl.scheduler.commands import ReleaseSamples
from asyncrl.steering.user_commands import Orders, read_orders, with_orders
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.messages.control import Accepted, Refused, ScaleRequest
from asyncrl.wire.messages.unfinished_samples import (
    Place,
    UnfinishedSample,
    read_index,
    write_unfinished,
)
from asyncrl.wire.weights.layout import Fingerprint

KEPT = KeptTokens(
    np.array([3], np.int32),
    np.array([-1], np.float32),
    np.array([[3]], np.int32),
    np.array([[-1]], np.float32),
    np.array([17], np.uint64),
)
VERIFY = {"on_update": "verify", "group_size": 2, "groups_per_step": 1}


class Scaled(Run):
    """A run whose number of generators can be ordered."""

    def __init__(self, path: Path, **settings: Any) -> None:
        super().__init__(path, steps=3, **(settings or VERIFY))
        self.refusal: str | None = None
        self.orders = Orders(
            self.directory.path, lambda: self.training.trained_steps, lambda _: self.refusal
        )
        scaling = Scaling(self.fleet, self.training, self.evaluation)
        self.orders.add(ScaleRequest, scaling.carry_out)

    async def scale(self, generators: int) -> Any:
        return await self.orders.answer(ScaleRequest(generators))

    def states(self) -> dict[str, str]:
        return {one.name: one.state for one in self.fleet.every_generator}

    async def ends(self, name: str, code: int = 0) -> None:
        self.fleet.heard_from(name).handle.code = code  # type: ignore[union-attr]
        await self.watchdog.check()


def ready(name: str) -> fg.GeneratorReady:
    return fg.GeneratorReady(name, 2, 0, Fingerprint({}, ""), None)


def test_a_joiner_gets_work_at_once_and_a_leavers_samples_move(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Scaled(tmp_path)
        training = await run.begin()
        run.hub.take()
        assert await run.scale(2) == Accepted("generator-1 will join (from step 0 on)", 0)
        started = await run.hear("generator-1", ready("generator-1"))
        assert {type(message) for _, message in started} == {tg.Generate}
        assert await run.scale(1) == Accepted("generator-1 will leave (from step 0 on)", 0)
        ((name, release),) = run.hub.take()
        assert name == "generator-1"
        assert isinstance(release, tg.Release)
        assert Path(release.file) == run.directory.path / "unfinished/moved/generator-1.bin"
        assert set(release.samples) == {one.sample for _, one in started}
        (first, *_) = release.samples
        written = [UnfinishedSample.of(first, "train-0", KEPT)]
        write_unfinished(Path(release.file), release.policy_version, release.settings, written)
        await run.hear("generator-1", fg.Released("generator-1", release.file))
        async with asyncio.timeout(60):
            while not (sent := run.hub.take()):  # noqa: ASYNC110 - a thread reads the file
                await asyncio.sleep(0.01)
        assert sent == [("generator-1", tg.Shutdown())]
        for sample in (SampleId(0, 0), SampleId(0, 1), SampleId(1, 0)):
            done = fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST)
            sent += await run.hear(G, done)
        again = {one.sample: one for to, one in sent if isinstance(one, tg.Generate)}
        assert set(again) >= set(release.samples)
        assert again[first].unfinished is not None
        assert again[first].unfinished.seed != again[first].seed
        assert all(one.unfinished is None for one in again.values() if one.sample != first)
        assert run.progress.said[-1].endswith("samples that move with their tokens: 1")
        assert run.states() == {G: "ready", "generator-1": "leaving"}
        await run.ends("generator-1")
        assert run.progress.said[-1] == "generator-1 has left"
        assert run.states() == {G: "ready", "generator-1": "left"}, "and nobody replaces it"
        assert run.fleet._launcher.given_back == [1]  # type: ignore[attr-defined]
        training.cancel()

    asyncio.run(scenario())


def test_orders_that_cannot_be_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Scaled(tmp_path)
        reply = await run.scale(0)
        assert isinstance(reply, Refused)
        assert reply.reason.startswith("a run needs at least one generator")
        reply = await run.scale(9)
        assert reply == Refused("there is no room for generator-8")
        run.refusal = "the run is stopping"
        assert await run.scale(1) == Refused("the run is stopping")
        assert run.states() == {G: "ready"}
        assert read_orders(run.directory.path) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("held_by", ["pause", "trainer"])
def test_a_leaver_has_its_time_again_after_a_pause_and_without_a_trainer(
    tmp_path: Path, held_by: str
) -> None:
    async def scenario() -> None:
        run = Scaled(tmp_path, on_update="keep")
        training = await run.begin()
        await run.scale(2)
        await run.hear("generator-1", ready("generator-1"))
        await run.scale(1)
        (leaver,) = [one for one in run.fleet.every_generator if one.name == "generator-1"]
        assert leaver.leave_by is not None
        if held_by == "pause":
            await run.training.apply(events.PauseRequested())
        else:
            await run.training.trainer_lost()
        leaver.leave_by -= run.config.launcher.leave_seconds - 5
        for _ in range(10):  # nine seconds pass; the watchdog comes as often as usual
            leaver.leave_by -= 0.9
            run.fleet._last_check -= 0.9
            await run.watchdog.check()
        assert leaver.state == "leaving"
        if held_by == "pause":
            await run.training.apply(events.ResumeRequested())
        else:
            await run.training.trainer_ready(0, "")
        leaver.leave_by -= 100
        await run.watchdog.check()
        assert leaver.state == "lost"
        said = " ".join(run.progress.said)
        assert "did not leave within 600 s (launcher.leave_seconds)" in said
        assert "short responses are trained on rather than long ones" in said
        training.cancel()

    asyncio.run(scenario())


def test_a_name_and_a_seed_are_never_used_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Scaled(tmp_path)
        await run.scale(2)
        await run.scale(1)  # it was not ready yet
        assert run.fleet.heard_from("generator-1").handle.ended == ["term"]  # type: ignore[union-attr]
        await run.ends("generator-1", 143)
        await run.scale(2)
        assert run.states() == {G: "ready", "generator-1": "left", "generator-1.1": "starting"}
        sample = SampleId(5, 0)
        run.requests.starts_from("")
        seeds = [run.requests.verify([sample], 3).seeds[0], run.requests.generate(sample, 0).seed]
        place = write_place(tmp_path / "a.bin", sample)
        for _ in range(2):
            run.requests.add_moved("a.bin", [place])
            moved = run.requests.generate(sample, 0)
            assert moved.unfinished is not None
            seeds += [moved.unfinished.seed, run.requests.verify([sample], 3).seeds[0]]
        assert len(set(seeds)) == 6

    asyncio.run(scenario())


def write_place(path: Path, sample: SampleId) -> Place:
    write_unfinished(path, 0, "s", [UnfinishedSample.of(sample, "p", KEPT)])
    return read_index(path).places[0]


@pytest.mark.parametrize("damage", ["cannot write", "other file", ""])
def test_a_file_that_cannot_be_used_is_named_and_its_samples_come_again(
    tmp_path: Path, damage: str
) -> None:
    run = Scaled(tmp_path)
    run.requests.starts_from("")
    moves: SampleHandover = run.moves
    release = moves.request(ReleaseSamples("generator-1", (SampleId(0, 0),)), 4)
    if damage == "other file":
        write_unfinished(Path(release.file), 4, "other settings", [])
    answer = fg.Released("generator-1", release.file, "cannot write it" * (damage[:1] == "c"))
    asyncio.run(moves.take("generator-1", answer, is_lost=lambda: False))
    assert run.progress.said[-1].endswith("; its samples are generated again")
    assert run.requests.generate(SampleId(0, 0), 0).unfinished is None


def test_a_file_goes_when_its_last_group_is_settled(tmp_path: Path) -> None:
    run = Scaled(tmp_path)
    run.requests.starts_from("")
    samples = SampleId(0, 1), SampleId(2, 0)
    release = run.moves.request(ReleaseSamples("generator-1", samples), 4)
    file = Path(release.file)
    written = [UnfinishedSample.of(one, "p", KEPT) for one in samples]
    write_unfinished(file, 4, release.settings, written)
    answer = fg.Released("generator-1", release.file)
    asyncio.run(run.moves.take("generator-1", answer, is_lost=lambda: False))
    asyncio.run(run.moves.forget_before(2))
    assert file.exists()
    assert run.requests.generate(samples[0], 0).unfinished is None
    assert run.requests.generate(samples[1], 0).unfinished is not None
    lost = run.moves.request(ReleaseSamples("generator-2", samples), 4)
    write_unfinished(Path(lost.file), 4, lost.settings, written)  # and it died before it said so
    asyncio.run(run.moves.forget_before(3))
    assert list(file.parent.iterdir()) == []


def test_files_go_with_the_step_that_trains_on_them(tmp_path: Path) -> None:
    run = Scaled(tmp_path)
    release = run.moves.request(ReleaseSamples("generator-1", (SampleId(1, 0),)), 0)
    write_unfinished(Path(release.file), 0, release.settings, [])
    for settled in (1, 2):  # group 1 is that of step 1
        assert Path(release.file).exists()
        asyncio.run(run.moves.forget_before(settled))
    assert not Path(release.file).exists()


def test_a_leaver_that_dies_while_its_file_is_read_has_moved_nothing(tmp_path: Path) -> None:
    """Its samples have been started elsewhere: stale tokens would continue them later."""

    class Death:
        """While the file is shared."""

        async def share(self, _file: str, generator: str) -> None:
            await run.ends(generator, -9)

    run = Scaled(tmp_path)

    async def scenario() -> None:
        training = await run.begin()
        run.moves._sharing = Death()
        await run.scale(2)
        await run.hear("generator-1", ready("generator-1"))
        await run.scale(1)
        (release,) = [one for _, one in run.hub.take() if isinstance(one, tg.Release)]
        written = [UnfinishedSample.of(one, "train-0", KEPT) for one in release.samples]
        write_unfinished(Path(release.file), release.policy_version, release.settings, written)
        await run.hear("generator-1", fg.Released("generator-1", release.file))
        async with asyncio.timeout(60):
            await asyncio.gather(*run.inbox._moving)
        assert run.states()["generator-1"] == "lost"
        assert run.progress.said[-1] == (
            "generator-1 leaves: it was lost before its samples could move; its samples are "
            "generated again"
        )
        again = [run.requests.generate(sample, 0) for sample in release.samples]
        assert all(one.unfinished is None for one in again)
        training.cancel()

    asyncio.run(scenario())


def test_a_resumed_run_has_the_number_last_ordered(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Scaled(tmp_path)
        await run.scale(4)
        await run.scale(3)
        assert [one.arguments["generators"] for one in read_orders(run.directory.path)] == [4, 3]
        assert with_orders(run.config, []).launcher.generators == 3
        assert with_orders(run.config, ["run.steps=9"]).launcher.generators == 3
        assert with_orders(run.config, ["launcher.generators=1"]).launcher.generators == 3
        (first, _) = read_orders(run.directory.path)
        assert first.before == 1, "so the order wins over a command that is repeated"
        before = dump_config(run_config(run=run.config.run.model_dump()))
        assert dump_config(with_orders(run_config(run=run.config.run.model_dump()), [])) != before

    asyncio.run(scenario())


def test_the_report_shows_orders(tmp_path: Path) -> None:
    run = Scaled(tmp_path)
    asyncio.run(run.scale(2))
    shown = orders(load_run(run.directory.path))
    assert shown is not None
    assert "<b>scale generators=2</b> (generator-1 will join)" in shown
    assert "step 0: " in shown
