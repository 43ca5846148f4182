"""A run under attack trains on what it trains on when it is left alone."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from asyncrl.wire.messages import (
    control,
    data,
    from_generator,
    from_trainer,
    to_generator,
    to_trainer,
)
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused
from benchmarks.hostile.frames import Frames


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
