"""A generator among fakes whose environments run in real worker processes, which are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import held_world
from counting_environments import KEPT, NEW, until
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play
from held_world import World, answer_to
from local_environments import NumberRenderer, in_words

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.translation import Translation
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.generator.turns.environment_turns import Episodes
from asyncrl.rewards.config import RewardConfig
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.weights.layout import WeightManifest


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rewind_killed_workers_and_a_discard_while_an_environment_answers(tmp_path: Path) -> None:
    """Each turn has its own answer once, whatever happened while it was waited for."""
    world = World(tmp_path)
    config = EnvironmentConfig(
        name=f"{held_world.__file__}:Held",
        args={"folder": str(tmp_path)},
        step_timeout_seconds=600,
    )
    pool = EnvironmentPool(config, RewardConfig())
    translation = Translation(NumberRenderer(), in_words, 100, max_observation_tokens=8)
    episodes = Episodes(pool, translation, max_tokens=60, max_model_len=80)

    async def held(*turns: list[int], times: int) -> int:
        """Wait until these turns wait for their answer for the so-manieth time; the process."""

        def found() -> list[int]:
            return [one["pid"] for one in world.notes("held") if one["turns"] == list(turns)]

        await until(lambda: len(found()) == times)
        return found()[-1]

    def said(*turns: list[int]) -> list[int]:
        (seed,) = {one["seed"] for one in world.notes()}
        return [int(word) for word in answer_to("?", seed, turns).split()]

    async def scenario(harness: GeneratorHarness) -> None:
        async def install(version: int, lineage: int) -> None:
            manifest = WeightManifest(version, "f", 64, ())
            await harness.send(tg.InstallWeights(manifest, lineage=lineage))

        engine, requests = harness.engine, harness.engine.requests
        await install(3, 0)
        world.hold()
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
        await until(lambda: requests)
        engine.feed("train-5.1", [3, 4], 3, end="stop")
        first = await held([3, 4], times=1)
        await harness.send(tg.Rewind(1, lineage=1))
        assert [m for m in harness.control.sent if type(m) is fg.Rewound]
        os.kill(first, signal.SIGKILL)
        second = await held([3, 4], times=2)
        await install(1, 1)
        await harness.send(tg.Verify((SAMPLE,), (9,), 1))
        assert len(requests) == 1, "its environment has not answered"
        world.release()
        await until(lambda: len(requests) == 2)
        kept = requests[1].kept
        assert kept is not None, "the policy that drew it is gone"
        assert (requests[1].request_id, kept.tokens.tolist()) == (
            "train-5.1-v1-l1",
            [3, 4, *said([3, 4])],
        )
        world.hold()
        engine.feed("train-5.1-v1-l1", [3, 5], 1, origins=[KEPT, NEW], end="stop")
        assert await held([3, 5], times=1) == second, "made again in the same process"
        os.kill(second, signal.SIGKILL)
        third = await held([3, 5], times=2)
        world.release()
        await until(lambda: len(requests) == 3)
        assert requests[2].prefix_tokens.tolist() == [3, 5, *said([3, 5])]
        world.hold()
        engine.feed(requests[2].request_id, [6], 1, end="stop")
        assert await held([3, 5], [6], times=1) == third
        await harness.send(tg.Discard((SAMPLE,)))
        world.release()
        await until(lambda: [one for one in world.notes("closed") if one["pid"] == third])
        assert not harness.finished()
        await until(lambda: not any(lane.sessions or lane.sent for lane in pool._lanes))
        counts = harness.generator.environment
        assert (counts.replayed, counts.started_over, counts.replaced_workers) == (3, 0, 2)
        await pool.close(grace_seconds=30)
        opened, closed = ([one["pid"] for one in world.notes(x)] for x in ("opened", "closed"))
        assert opened == [first, second, second, third]
        assert closed == [second, third], "the others ended with their process"
        assert not [pid for pid in (first, second, third) if is_alive(pid)]

    async def with_pool(harness: GeneratorHarness) -> None:
        await pool.start()
        try:
            await scenario(harness)
        finally:
            await pool.close()

    play(with_pool, episodes=episodes, environment=pool)
