"""Every part of a run on agents leaves, is killed and comes back: `python tests/deploy/agents.py`.

Real processes of this machine, with relays between them as between machines. It takes about two
minutes on two quiet cores, says what happens, and ends in a verdict.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from agents import Agents  # noqa: E402
from asyncrl_runs import CommandLine, until, worst_mismatch  # noqa: E402

from asyncrl.monitoring.records.group_account import read_account  # noqa: E402

SETTINGS = {
    "run__steps": 1_000_000,
    "trainer__checkpoint_every": 2,
    "launcher__agents__silence_seconds": 5,
    "launcher__agents__relays": "always",
    "monitoring__live": "plain",
}


class Scenario:
    """One run and its agents, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.agents = Agents(folder)
        model = folder / "model"
        make = [sys.executable, "examples/your_own/make_model.py", str(model)]
        subprocess.run(make, cwd=ROOT, check=True)
        self.command = CommandLine(folder / "runs", model)
        self.log = folder / "run.log"
        self.began = time.monotonic()
        self.asyncrl("agent-key", str(self.agents.key_file))
        self.run = self.start()

    def asyncrl(self, *arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "asyncrl", *arguments], cwd=ROOT, check=True)

    def start(self) -> subprocess.Popen[bytes]:
        arguments = self.command.arguments("--continue", *self.agents.settings, **SETTINGS)
        with self.log.open("a") as log:
            return subprocess.Popen(arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    @property
    def steps(self) -> int:
        path = self.command.folder / "metrics.jsonl"
        return self.command.steps() if path.exists() else 0

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until(lambda: self.run.poll() is not None or condition(), seconds=300, what=what)
        print(f"{time.monotonic() - self.began:6.1f} s  step {self.steps:5}  {what}", flush=True)
        if self.run.poll() is not None:
            raise SystemExit(f"the run ended: {self.log.read_text()[-2000:]}")

    def said(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.log.read_text()

    def trains(self, what: str) -> None:
        before = self.steps
        self.wait(lambda: self.steps >= before + 2, what)

    def leave(self, name: str) -> None:
        process = self.agents.started[name]
        process.send_signal(signal.SIGTERM)
        self.wait(lambda: process.poll() is not None, f"agent {name} has left")
        assert process.returncode == 0, self.agents.said(name)

    def play(self) -> None:
        agents = self.agents
        agents.start("t", "trainer")
        agents.start("g", "generator")
        self.trains("it trains")
        agents.start("h", "generator")
        self.wait(self.said("generator-1 has joined"), "a generator has joined")
        self.leave("g")
        agents.started["h"].kill()
        self.wait(self.said("generator-1.1 waits for an agent"), "the only generator was killed")
        agents.start("i", "generator")
        self.trains("another one generates")
        agents.started["t"].kill()
        self.wait(self.said("trainer.1 waits for an agent"), "the trainer was killed")
        agents.start("u", "trainer")
        self.trains("another one trains")
        agents.start("v", "trainer")
        self.leave("u")
        self.wait(self.said("started trainer.2"), "the trainer left after a checkpoint")
        self.trains("a third one trains")
        self.run.kill()
        self.run.wait()
        self.run = self.start()
        self.trains("the controller was killed, and found its agents again")
        self.asyncrl("stop", str(self.command.folder))
        self.run.wait(timeout=300)
        steps = self.command.metrics()
        assert self.run.returncode == 0, self.log.read_text()
        assert [one.step for one in steps] == list(range(len(steps)))
        assert read_account(self.command.folder).is_exact
        assert max(one.staleness.max for one in steps) == 0
        mismatch = worst_mismatch(steps)
        assert mismatch < 1e-3
        print(f"PASSED: {len(steps)} steps, each group once, largest mismatch {mismatch:.1e}")


def main() -> None:
    """Play the scenario in a temporary folder; what it started is ended in any case."""
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        scenario = Scenario(Path(folder))
        try:
            scenario.play()
        finally:
            scenario.agents.end()
            scenario.run.kill()
            scenario.run.wait()


if __name__ == "__main__":
    main()
