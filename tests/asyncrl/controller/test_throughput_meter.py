"""Speeds of generators, from the counters that they report."""

from asyncrl.controller.inbox import SpeedMeter
from asyncrl.wire.records.step import EngineStats, TokenCounts


def stats(generated: int, running: int = 8) -> EngineStats:
    return EngineStats(tokens=TokenCounts(generated=generated), running=running, slots=8)


def test_a_speed_is_tokens_per_running_sample_and_second_and_the_first_one_is_dropped() -> None:
    meter, tokens, speeds = SpeedMeter(), 0, []
    for second in range(21):  # 10 tokens a second for each of 8 samples, at first half as many
        tokens += 40 if second <= 5 else 80
        speeds.append(meter.reported("g", stats(tokens), second))
    assert [speed for speed in speeds if speed is not None] == [10.0, 10.0, 10.0]


def test_time_without_a_token_does_not_count() -> None:
    meter, tokens = SpeedMeter(), 0
    for second in range(60):
        works = second % 3 == 0  # paused, idle, or installing weights otherwise
        tokens += 80 if works else 0
        speed = meter.reported("g", stats(tokens), second)
        assert speed is None or speed == 10.0
    assert speed is None or speed == 10.0
