"""Held-out samples whose reward worker dies, with real reward workers and a fake engine."""

from __future__ import annotations

from pathlib import Path

from generator_harness import PROMPT, GeneratorHarness, play
from reward_pools import running

from wire.messages import from_generator as fg
from wire.messages import to_generator as tg

KILLED_ONCE = """
import os, pathlib, signal
mark = pathlib.Path(__file__).with_suffix(".mark")

def score(prompt, response, example):
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


def test_a_held_out_sample_outlives_its_reward_worker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KILLED_ONCE)

    async def scenario(harness: GeneratorHarness) -> None:
        async with running({"name": f"{tmp_path}/mine.py:score"}) as pool:
            harness.rewards.score = pool.score  # type: ignore[assignment]
            before = len(harness.control.sent)
            await harness.send(tg.Evaluate(round=3, index=4, prompt=PROMPT, seed=7))
            harness.engine.feed("eval-3.4", [3, 4], 1, end="stop")
            wanted = fg.EvaluationSample("g0", 3, 4, 1.0, 1, 1, 2)
            while wanted not in harness.control.sent:
                before += 1
                await harness.control.wait_until_sent(before)
            assert pool.counts.retried == 1

    play(scenario)
