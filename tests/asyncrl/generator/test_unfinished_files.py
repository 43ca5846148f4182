"""Run-ahead that a generator saves with a checkpoint and another one continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.messages.unfinished_samples import Index, read_index, read_sample
from asyncrl.wire.weights.layout import WeightManifest

HELD, EMPTY, DUE = SampleId(6, 0), SampleId(6, 1), SampleId(4, 0)


def save(path: Path, first_group: int = 5) -> tg.SaveUnfinished:
    return tg.SaveUnfinished(str(path), 2, "s", first_group)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what a thread does."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a thread's file
            await asyncio.sleep(0.01)


async def written(path: Path) -> Index:
    await until(path.exists)
    return read_index(path)


def saved(path: Path) -> dict[SampleId, list[int]]:
    """Run a generator up to a checkpoint; the tokens in its file."""

    async def scenario(harness: GeneratorHarness) -> None:
        for sample in (SAMPLE, HELD, EMPTY, DUE):
            await harness.send(tg.Generate(sample, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 0)
        # Drawn and not reported yet. Without it, that no end was reported would say something
        # about this token.
        harness.engine.unreported["train-5.1"] = ([4], 0)
        harness.engine.feed("train-6.0", [5, 6, 7], 0, end="stop")
        harness.engine.feed("train-4.0", [8], 0)
        await settle()
        harness.control.inbox.put_nowait(save(path))
        await written(path)
        await settle()
        again = {one.request_id: one for one in harness.engine.requests}["train-5.1+1"]
        assert again.prefix_tokens.tolist() == [3, 4]
        assert again.sampling.seed == 7, "the sample continues as after any interruption"
        assert len(harness.process.samples.held) == 1

    play(scenario)
    return {
        place.sample: read_sample(path, place, prompt_id="p").tokens.tolist()
        for place in read_index(path).places
    }


def test_all_run_ahead_is_saved_finished_or_not(tmp_path: Path) -> None:
    assert saved(tmp_path / "a" / "g0.bin") == {HELD: [5, 6, 7], SAMPLE: [3, 4]}


def test_restored_tokens_are_verified_with_a_seed_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "g0.bin"
    saved(path)
    places = {place.sample: place for place in read_index(path).places}

    async def scenario(harness: GeneratorHarness) -> None:
        for sample in (HELD, SAMPLE):
            unfinished = tg.Unfinished(str(path), places[sample], seed=99)
            harness.control.inbox.put_nowait(tg.Generate(sample, PROMPT, 7, 1, unfinished))
        await until(lambda: len(harness.engine.requests) == 2)
        held, running = harness.engine.requests
        assert held.kept is not None
        assert running.kept is not None
        assert held.kept.tokens.tolist() == [5, 6, 7]
        assert running.kept.tokens.tolist() == [3, 4]
        assert running.kept.logprobs.tolist() == [-0.5, -0.5]
        assert running.kept.lenience is None
        assert {one.sampling.seed for one in (held, running)} == {99}
        # Saved once more before any token was judged: nothing is lost.
        harness.control.inbox.put_nowait(save(tmp_path / "again.bin"))
        await written(tmp_path / "again.bin")
        await settle()
        assert {one.sample for one in read_index(tmp_path / "again.bin").places} == set(places)
        name = harness.engine.requests[-2].request_id
        harness.engine.feed(name, [5, 6], 2, verified=2, end="stop")
        await settle()
        assert [one.oldest_version for one in harness.finished()] == [2], "verified, so of now"
        assert harness.generator.tokens.verified == 2

    play(scenario)


def test_tokens_that_cannot_be_read_are_generated_again_with_the_samples_seed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "g0.bin"
    saved(path)
    place = read_index(path).places[0]
    path.unlink()

    async def scenario(harness: GeneratorHarness) -> None:
        unfinished = tg.Unfinished(str(path), place, seed=99)
        harness.control.inbox.put_nowait(tg.Generate(place.sample, PROMPT, 7, 1, unfinished))
        await until(lambda: harness.engine.requests)
        (request,) = harness.engine.requests
        assert request.kept is None
        assert request.sampling.seed == 7

    play(scenario)


def test_a_disk_that_takes_no_file_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "not-a-folder").write_text("")

    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        await until(lambda: harness.engine.requests)  # else there is nothing to interrupt
        harness.control.inbox.put_nowait(save(tmp_path / "not-a-folder" / "g0.bin"))
        await until(lambda: len(harness.engine.requests) == 2)
        harness.engine.feed("train-5.1+1", [5], 0, end="stop")
        await settle()
        assert len(harness.finished()) == 1

    play(scenario)


def test_released_samples_are_written_and_forgotten_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "moved" / "g0.bin"

    async def scenario(harness: GeneratorHarness) -> None:
        for sample in (SAMPLE, HELD, EMPTY, DUE):
            await harness.send(tg.Generate(sample, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 0)
        harness.engine.unreported["train-5.1"] = ([4], 0)
        harness.engine.feed("train-6.0", [5, 6, 7], 0, end="stop")
        await settle()
        requests = len(harness.engine.requests)
        harness.control.inbox.put_nowait(tg.Release(str(path), 2, "s", (SAMPLE, HELD, EMPTY)))
        await until(lambda: any(isinstance(one, fg.Released) for one in harness.control.sent))
        (answer,) = [one for one in harness.control.sent if isinstance(one, fg.Released)]
        assert answer == fg.Released("g0", str(path))
        assert {one.sample for one in read_index(path).places} == {SAMPLE, HELD}
        assert not harness.process.samples.held
        assert [one.sample for one in harness.process.samples.in_generation] == [DUE]
        await settle()
        assert len(harness.engine.requests) == requests + 1, "only this one is resumed"

    play(scenario)


def test_what_cannot_be_written_is_forgotten_too(tmp_path: Path) -> None:
    (tmp_path / "not-a-folder").write_text("")

    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(HELD, PROMPT, 7))
        harness.engine.feed("train-6.0", [5], 0, end="stop")
        await settle()
        file = str(tmp_path / "not-a-folder" / "g0.bin")
        harness.control.inbox.put_nowait(tg.Release(file, 2, "s", (HELD,)))
        await until(lambda: any(isinstance(one, fg.Released) for one in harness.control.sent))
        (answer,) = [one for one in harness.control.sent if isinstance(one, fg.Released)]
        assert answer.reason.startswith("cannot write")
        assert not harness.process.samples.held

    play(scenario)


def test_saving_and_releasing_wait_for_an_installation_and_hold_up_nothing(
    tmp_path: Path,
) -> None:
    saved_to, moved_to = tmp_path / "saved.bin", tmp_path / "moved.bin"
    later = SampleId(9, 0)

    async def scenario(harness: GeneratorHarness) -> None:
        staged = asyncio.Event()
        stage = harness.engine.stage_weights

        async def slow(manifest: WeightManifest) -> None:
            await staged.wait()
            await stage(manifest)

        harness.engine.stage_weights = slow  # type: ignore[method-assign]
        for sample in (HELD, DUE, SAMPLE):
            await harness.send(tg.Generate(sample, PROMPT, 7))
        harness.engine.feed("train-6.0", [5, 6], 0, end="stop")
        harness.engine.feed("train-4.0", [8], 0, end="stop")
        harness.engine.feed("train-5.1", [3], 0)
        await settle()
        await harness.send(tg.InstallWeights(WeightManifest(1, "x", 0, ())))
        await harness.send(save(saved_to))
        await harness.send(tg.Release(str(moved_to), 2, "s", (SAMPLE,)))
        await harness.send(tg.Deliver(0, (HELD,)))
        await harness.send(tg.Deliver(0, (DUE,)))
        await harness.send(tg.Generate(later, PROMPT, 7))
        assert harness.engine.requests[-1].request_id == "train-9.0", "it is served meanwhile"
        assert [one.sample for one in harness.data.sent] == [DUE], "not yet what is to be saved"
        staged.set()
        await written(saved_to)
        await until(lambda: any(isinstance(one, fg.Released) for one in harness.control.sent))
        await settle()
        assert {one.sample for one in read_index(saved_to).places} == {HELD, SAMPLE}
        assert {one.sample for one in read_index(moved_to).places} == {SAMPLE}
        assert [one.sample for one in harness.data.sent] == [DUE, HELD]
        assert [one.sample for one in harness.process.samples.in_generation] == [later]

    play(scenario)
