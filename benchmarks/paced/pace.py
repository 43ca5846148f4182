"""The pace of a modelled device: how long its work lasts, and a clock that keeps to it.

A paced run is a real run whose lengths are divided by `Scale.lengths` and whose rows stand for
`Scale.rows` rows of the device. What belongs to a token then counts that many times: the KV of a
token of context is read for `lengths * rows` tokens, a token that is fed or trained on is computed
for `rows` tokens. What happens once a step of the trainer (weights, optimizer) takes `1 / lengths`
of its time, as the step does. So every ratio of two durations is that of the device, and the run is
`lengths` times as short. `Scale.dilation` then slows everything down, so that the device is slower
than the host.
"""

import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from asyncrl.simulation.cost import Cost

PACE_VARIABLE = "ASYNCRL_BENCHMARK_PACE"
"""Environment variable that hands a run's `Pace` to its processes, as JSON."""
_RECORD_SECONDS = 0.1


@dataclass(frozen=True)
class Scale:
    """How a paced run differs in size from the one that it stands for."""

    lengths: float = 64.0
    """Tokens of a response of the device for one token of the paced run."""
    rows: float = 2.0
    """Rows of the device for one row of the paced run."""
    dilation: float = 2.0
    """Seconds of the paced run for a second of the device."""

    def paced(self, cost: Cost) -> Cost:
        """The costs of a device, as those of the paced run. Messages are real and stay."""
        return replace(
            cost,
            memory_seconds=cost.memory_seconds * self.dilation,
            step_seconds=cost.step_seconds * self.dilation,
            token_seconds=cost.token_seconds * self.dilation * self.rows,
            kv_seconds=cost.kv_seconds * self.dilation * self.rows * self.lengths,
            train_token_seconds=cost.train_token_seconds * self.dilation * self.rows,
            swap_seconds=cost.swap_seconds * self.dilation / self.lengths,
            stage_seconds=cost.stage_seconds * self.dilation / self.lengths,
            optimizer_seconds=cost.optimizer_seconds * self.dilation / self.lengths,
        )


class Work(msgspec.Struct, frozen=True):
    """A line of a device's record: what it did since the line before."""

    time: float
    """Unix time of the end."""
    seconds: dict[str, float]
    """Modelled seconds by kind of work: step, score, install, train, optimizer."""
    items: int
    """Engine steps, groups and so on."""
    computed: float
    """Real seconds of the computations that the modelled ones stand for."""
    overrun: float
    """Real seconds beyond the modelled ones, where the host was slower than the device."""
    lengths: list[tuple[int, int, int]] = []
    """Trainer: (group, sample, response tokens) of what was trained on."""


class PacedDevice:
    """Does one thing after the other, each in the modelled time. Used by one thread at a time.

    Deadlines do not add up their delays: a wait that ended late is taken off the next work.
    """

    def __init__(self, record: Path | None = None) -> None:
        self._record = record
        self._overslept = 0.0
        self._clear()
        if record is not None:
            record.parent.mkdir(parents=True, exist_ok=True)

    def begin(self) -> float:
        """The moment at which the next work begins, in monotonic seconds."""
        overslept, self._overslept = self._overslept, 0.0
        return time.monotonic() - overslept

    def finish(self, kind: str, began: float, seconds: float) -> None:
        """Wait until work that began at `began` has lasted for `seconds`."""
        end, now = began + seconds, time.monotonic()
        self._computed += now - began
        if now < end:
            time.sleep(end - now)
            self._overslept = time.monotonic() - end
        else:
            self._overrun += now - end
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
        self._items += 1
        if time.monotonic() - self._written > _RECORD_SECONDS:
            self.flush()

    def trained(self, group: int, sample: int, tokens: int) -> None:
        """Record a response that was trained on."""
        self._lengths.append((group, sample, tokens))

    def flush(self) -> None:
        """Write what was done since the last time."""
        if self._record is not None:
            line = Work(
                time.time(),
                self._seconds,
                self._items,
                self._computed,
                self._overrun,
                self._lengths,
            )
            with self._record.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        self._clear()

    def _clear(self) -> None:
        self._seconds: dict[str, float] = {}
        self._items, self._computed, self._overrun = 0, 0.0, 0.0
        self._lengths: list[tuple[int, int, int]] = []
        self._written = time.monotonic()


def pace_variable(cost: Cost) -> dict[str, str]:
    """The environment of a run at this pace."""
    return {PACE_VARIABLE: msgspec.json.encode(asdict(cost)).decode()}


def cost_of_environment() -> Cost:
    """The costs that `pace_variable` has set. Raises KeyError if it has not."""
    return Cost(**msgspec.json.decode(os.environ[PACE_VARIABLE]))
