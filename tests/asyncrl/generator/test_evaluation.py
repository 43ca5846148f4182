"""Held-out samples whose reward fails, with real reward workers and a fake engine."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from generator_harness import PROMPT, GeneratorHarness, play
from reward_pools import running

from asyncrl.evaluation.round import EvaluationPlan, EvaluationRound, PlannedSet
from asyncrl.monitoring.terminal.evaluation_text import evaluation_lines
from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg

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
            assert [one.sampling.temperature for one in harness.engine.requests] == [0.5]
            wanted = fg.EvaluationSample("g0", 3, 4, 1.0, 1, 1, 2)
            while wanted not in harness.control.sent:
                before += 1
                await harness.control.wait_until_sent(before)
            assert pool.counts.retried == 1

    play(scenario)


JUDGE = """
import http.server, json

class Judge(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        said = {"choices": [{"message": {"content": "Score: 1"}}]}
        data = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def a_judge() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own that finds every answer right, and its address."""
    process = subprocess.Popen([sys.executable, "-c", JUDGE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.communicate()


def samples_in(sent: list[Any]) -> list[fg.EvaluationSample]:
    return [one for one in sent if isinstance(one, fg.EvaluationSample)]


def test_a_judge_that_is_killed_in_an_evaluation_leaves_it_incomplete_and_makes_nothing_wrong() -> (
    None
):
    half = 4

    async def scenario(harness: GeneratorHarness) -> None:
        with a_judge() as (process, address):
            args = {
                "base_url": address,
                "model": "m",
                "template": "{response}",
                "score_pattern": "Score: (.*)",
                "attempts": 2,
                "breaker_failures": 2,
                "breaker_seconds": 600,
            }
            judge = {"name": "judge", "args": args}
            async with running(judge, timeout_seconds=60, on_error="zero") as pool:
                harness.rewards.score = pool.score  # type: ignore[assignment]
                plan = EvaluationPlan((PlannedSet("held_out", 2 * half, 1),))
                rounds = [
                    EvaluationRound(3, plan, EvaluationConfig(max_unscored_share=share))
                    for share in (0.49, 0.5)
                ]
                for index in range(2 * half):
                    if index == half:
                        process.kill()
                        process.wait()
                    await harness.send(tg.Evaluate(3, index, PROMPT, 7))
                    harness.engine.feed(f"eval-3.{index}", [3, 4], 1, end="stop")
                    while not (found := samples_in(harness.control.sent)):
                        await harness.control.wait_until_sent(len(harness.control.sent) + 1)
                    (said,) = found
                    harness.control.sent.remove(said)
                    for one in rounds:
                        one.came_back(said.index, said.reward, said.tokens, said.verdict)
                reasons = Counter(pool.counts.failed["judge"])
                assert reasons == {"unavailable": 2, "breaker_open": half - 2}
        few, enough = (one.record(7, "during") for one in rounds)
        assert evaluation_lines(few) == [
            "held-out accuracy of step 7: incomplete, 4 of 8 samples have no reward"
        ]
        assert enough.main is not None
        assert (enough.main.accuracy, enough.main.samples, enough.main.unscored) == (1.0, 4, 4)

    play(scenario)
