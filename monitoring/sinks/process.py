"""The loop of one sink: `python -m asyncrl.monitoring.sinks RUN KIND`.

It ends when its input is closed (the run has ended, in whatever way) and everything is sent, or
`finish_seconds` after that. With `--once` it sends what the sink lacks and ends.
"""

import argparse
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec
import yaml

from asyncrl.monitoring.sinks.config import SinkConfig
from asyncrl.monitoring.sinks.follow import Follower, News, read_state
from asyncrl.monitoring.sinks.kinds import open_sink
from asyncrl.monitoring.sinks.sink import Sink, SinkRun, table_of
from asyncrl.wire.records.evaluations import EvaluationRecord
from asyncrl.wire.records.step import StepMetrics

logger = logging.getLogger("asyncrl.sink")

POLL_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0
GIVEN_UP, UNSENT = 3, 4
"""Exit codes: it hung after the run's end; it could not send everything."""
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_LEFT_OUT = ("step", "time", "groups", "batch/response_lengths")
"""Identity, and fields that are not one number per step."""


def numbers_of_step(step: StepMetrics) -> dict[str, float]:
    """Measured numbers of a step, named as in metrics.jsonl: `learning/reward_mean`."""
    return dict(_numbers("", msgspec.to_builtins(step, str_keys=True)))


def numbers_of_evaluation(record: EvaluationRecord) -> dict[str, float]:
    """The numbers of an evaluation: `evaluation/held_out/accuracy`, `.../pass_at/4`."""
    values = msgspec.to_builtins(record, str_keys=True)
    about = {key: values[key] for key in ("seconds", "held_seconds")}
    return dict(_numbers("evaluation/", {**about, **values["sets"]}))


def _numbers(outer: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        name = f"{outer}{key}"
        if name in _LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(f"{name}/", value)
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            yield name, float(value)


class Following:
    """Sends one sink what it lacks. A failed call is retried later."""

    def __init__(
        self,
        run: Path,
        config: SinkConfig,
        opener: Callable[[SinkConfig, SinkRun], Sink] = open_sink,
    ) -> None:
        self._run = run
        self._config = config
        self._opener = opener
        self.state_file = run / "sinks" / f"{config.kind}.json"
        self._state = read_state(self.state_file)
        self._follower = Follower(run, self._state)
        self._sink: Sink | None = None
        self._waiting: News | None = None

    def pass_on(self) -> bool:
        """Send all news; return True if everything was sent."""
        if self._waiting is None:
            self._waiting = self._follower.news() or None
        if self._waiting is None:
            return True
        try:
            self._send(self._waiting)
            self._follower.save(self.state_file)
        except Exception as error:  # noqa: BLE001 - whatever a sink's package raises
            self._state.failures += 1
            logger.warning("%s failed: %s: %s", self._config.kind, type(error).__name__, error)
            return False
        self._waiting = None
        return True

    def _send(self, news: News) -> None:
        """Send records, taking each out of the news at once."""
        sink, state = self._opened(news), self._state
        while news.steps:
            step = news.steps[0]
            if step.step <= state.step:
                sink.went_back(step.step)
            sink.log(step.step, step.time, numbers_of_step(step))
            state.had(step)
            del news.steps[0]
        while news.evaluations:
            record = news.evaluations[0]
            sink.log(record.step, record.time, numbers_of_evaluation(record))
            state.had(record)
            del news.evaluations[0]
        while news.samples:
            name = table_of(news.samples[0])
            sink.table(name, [one for one in news.samples if table_of(one) == name])
            for one in [one for one in news.samples if table_of(one) == name]:
                state.had(one)
                news.samples.remove(one)
        sink.flush()

    def _opened(self, news: News) -> Sink:
        if self._sink is None:
            settings = yaml.safe_load((self._run / "config.yaml").read_text(encoding="utf-8"))
            first = news.steps[0].step if news.steps else self._state.step + 1
            folder, name = self._run / "sinks" / self._config.kind, str(settings["run"]["name"])
            run = SinkRun(name, folder, self._state.run_id, first, settings)
            self._sink = self._opener(self._config, run)
            self._state.run_id = self._sink.run_id
            self._follower.save(self.state_file)
        return self._sink

    def close(self) -> None:
        """End the sink's run."""
        if self._sink is not None:
            self._sink.close()


def follow(following: Following, ended: threading.Event, poll: float = POLL_SECONDS) -> bool:
    """Send until the run has ended; return False if the last attempt failed."""
    backoff = poll
    while not ended.wait(backoff):
        backoff = poll if following.pass_on() else min(MAX_BACKOFF_SECONDS, 2 * backoff)
    complete = following.pass_on() and following.pass_on()
    try:
        following.close()
    except Exception as error:  # noqa: BLE001 - whatever a sink's package raises
        logger.warning("cannot close the sink: %s: %s", type(error).__name__, error)
        return False
    return complete


class _WithoutSecrets:
    def __init__(self, stream: TextIO, secrets: Iterable[str]) -> None:
        self._stream = stream
        self._secrets = [one for one in secrets if len(one) > 5]

    def write(self, text: str) -> int:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _hide_secrets() -> None:
    found = [v for k, v in os.environ.items() if any(word in k.upper() for word in _SECRET)]
    sys.stdout = _WithoutSecrets(sys.stdout, found)
    sys.stderr = _WithoutSecrets(sys.stderr, found)


def _watch_input(ended: threading.Event, finish_seconds: float) -> None:
    """Wait for the end of the input; if the rest takes too long after it, end the process."""
    sys.stdin.buffer.read()
    ended.set()
    time.sleep(finish_seconds)
    logger.warning("not everything was sent within %g s after the run's end", finish_seconds)
    logging.shutdown()
    os._exit(GIVEN_UP)


def main(arguments: list[str] | None = None) -> int:
    """Run a sink; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.monitoring.sinks", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("kind", help="wandb, tensorboard or mlflow, as in monitoring.sinks")
    parser.add_argument("--once", action="store_true", help="send what it lacks, and end")
    parser.add_argument("--finish-seconds", type=float, default=30.0)
    chosen = parser.parse_args(arguments)
    _hide_secrets()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    os.nice(10)
    settings = yaml.safe_load((chosen.run / "config.yaml").read_text(encoding="utf-8"))
    entries = map(SinkConfig.model_validate, settings["monitoring"].get("sinks", []))
    config = next((one for one in entries if one.kind == chosen.kind), None)
    following = Following(chosen.run, config or SinkConfig.model_validate(chosen.kind))
    ended = threading.Event()
    if chosen.once:
        ended.set()
    else:
        waiting = ended, chosen.finish_seconds
        threading.Thread(target=_watch_input, args=waiting, daemon=True).start()
    return 0 if follow(following, ended) else UNSENT
