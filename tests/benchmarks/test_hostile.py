"""A run under attack trains on what it trains on when it is left alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from asyncrl.wire.decoding import FrameDecoder, FrameRefused
from asyncrl.wire.messages import (
    control,
    data,
    from_generator,
    from_trainer,
    to_generator,
    to_trainer,
)
from benchmarks.hostile.frames import Frames
from benchmarks.hostile.main import measure


def test_frames_repeat_and_nonsense_is_no_message() -> None:
    assert [Frames(3).parts() for _ in range(3)] == [Frames(3).parts() for _ in range(3)]
    frames = Frames(1, long=0.01)
    found: Counter[str] = Counter()
    for union in (
        from_generator.FromGenerator | from_trainer.FromTrainer, data.FromGeneratorData,
        control.Request, to_generator.ToGenerator, to_trainer.ToTrainer,
    ):  # fmt: skip
        decoder: FrameDecoder[msgspec.Struct] = FrameDecoder(union, max_bytes=1 << 16)
        for _ in range(500):
            with pytest.raises(FrameRefused) as refused:
                decoder.decode(frames.nonsense())
            found[refused.value.reason] += 1
    assert len(found) >= 4, found


@pytest.mark.slow
def test_a_run_under_attack_trains_on_the_same_bits(tmp_path: Path) -> None:
    """The run that is left alone has one generator instead of two, so other batches."""
    found = measure(2000, tmp_path, warm=5, alone=["launcher.generators=1"])
    assert found.difference == ""
    assert (found.processes_ended, found.status_failed) == (0, 0)
    assert sum(found.sent.values()) == 2000
    assert {"unauthenticated", "unknown_peer", "malformed", "cut_off"} <= found.refused.keys()
