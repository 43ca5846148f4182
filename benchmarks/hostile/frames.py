"""Bytes that a faulty or hostile process might send."""

import random

import msgspec

from asyncrl.rollout.trajectory import SampleId, Segment
from asyncrl.wire.messages import (
    control,
    data,
    from_generator,
    from_trainer,
    to_generator,
    to_trainer,
)
from asyncrl.wire.records.step import LearnerMetrics, TrainerTimes
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest


def _tagged(tag: bytes, rest: bytes) -> bytes:
    """A map of two entries: the tag of a message type, and `rest`, a key and its value."""
    return b"\x82\xa4type" + bytes([0xA0 + len(tag)]) + tag + rest


DEEP = b"\x91" * 100_000
CORPUS = {
    "empty": b"",
    "zeros": b"\0" * 64,
    "unused opcode": b"\xc1",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "tag not UTF-8": b"\x81\xa4type\xa4\xff\xfe\xff\xfe",
    "string not UTF-8": _tagged(b"generator.Goodbye", b"\xa9generator\xa2\xff\xff"),
    "key not UTF-8": _tagged(b"generator.Goodbye", b"\xa2\xff\xff\x01"),
    "unknown tag": msgspec.msgpack.encode({"type": "Rm", "path": "/"}),
    "no tag": msgspec.msgpack.encode({"generator": "g"}),
    "not a map": msgspec.msgpack.encode([1, 2, 3]),
    "deep list": DEEP,
    "deep field": _tagged(b"generator.Goodbye", b"\xa9generator" + DEEP),
    "deep unknown field": _tagged(b"StatusRequest", b"\xa1x" + DEEP + b"\xc0"),
    "huge list": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "huge string": _tagged(b"StatusRequest", b"\xdb\xff\xff\xff\xff"),
    "bad timestamp": _tagged(b"StatusReply", b"\xa6status\x81\xa1k\xc7\x0c\xff" + b"\xff" * 12),
    "other direction": msgspec.msgpack.encode(control.Accepted("yes")),
    "wrong type": msgspec.msgpack.encode(
        {"type": "generator.SampleFinished", "generator": 1, "sample": "x"}
    ),
    "cut short": msgspec.msgpack.encode(from_generator.Goodbye("generator-0"))[:-3],
    "too long": b"\x00" * 70_000,
}
"""By what is wrong with each. None is a message from a generator."""

_SHORT = [body for body in CORPUS.values() if len(body) < 1000]
_LONG = [body for body in CORPUS.values() if len(body) >= 1000]
_SAMPLE = SampleId(3, 1)
_DELIVERY = data.TrajectoryDelivery(
    step=0, sample=_SAMPLE, prompt_id="train-0", prompt_tokens=b"\1\0\0\0", tokens=b"\2\0\0\0" * 3,
    behaviour_logprobs=b"\0\0\0\0" * 3, provenance=b"\0\0\0", segments=(Segment(0, 0, 3),),
    finish_reason="stop", reward=251.0,
)  # fmt: skip
_WEIGHTS = WeightManifest(9, "forged", 0, ())
_FORGED: list[msgspec.Struct] = [
    from_generator.GeneratorReady("generator-0", 1 << 30, 7, Fingerprint({}, "")),
    from_generator.SampleFinished("generator-0", _SAMPLE, 3, 0, "stop", b"d" * 16),
    from_generator.SampleFinished("generator-0", SampleId(-1, 1 << 40), 1, -5, "stop", b""),
    from_generator.SampleFailed("generator-0", _SAMPLE, "the run must end", True),
    from_generator.SampleDelivered("generator-0", _SAMPLE),
    from_generator.EvaluationSample("generator-0", 0, 0, 1e30, 0),
    from_generator.WeightsInstalled("generator-0", 1 << 60),
    from_generator.Failure("generator-0", "the run must end", True),
    from_generator.Goodbye("generator-0"),
    from_trainer.TrainerReady(0, _WEIGHTS),
    from_trainer.StepFinished(0, (0, 1), _WEIGHTS, LearnerMetrics(), TrainerTimes()),
    from_trainer.CheckpointWritten(1 << 62, "/etc/passwd"),
    from_trainer.Failure("the run must end", True),
    from_trainer.Goodbye(),
    _DELIVERY,
    to_trainer.Shutdown(False),
    to_generator.Pause(),
    control.StatusReply({}),
]
"""Well-formed messages of every direction. What they say would change a run."""
_ENCODED = [msgspec.msgpack.encode(message) for message in _FORGED]


class Frames:
    """An endless mixture of hostile frames, determined by a seed."""

    def __init__(self, seed: int, *, long: float = 1 / 2000) -> None:
        self._random = random.Random(seed)
        self._long = long

    def parts(self) -> list[bytes]:
        """The parts of one ZeroMQ message; most have one."""
        if self._random.random() < 0.03:
            return [self.nonsense() for _ in range(self._random.choice((2, 3, 9)))]
        return [self.body()]

    def body(self) -> bytes:
        """A forged message, whole or damaged, or nonsense."""
        draw = self._random.random()
        if draw < 0.2:
            return self._random.choice(_ENCODED)
        if draw < 0.5:
            return self._damaged(self._random.choice(_ENCODED))
        return self.nonsense()

    def nonsense(self) -> bytes:
        """An entry of the corpus or random bytes; never a message."""
        draw = self._random.random()
        if draw < self._long:
            return self._random.choice(_LONG)
        if draw < 0.5:
            return self._random.choice(_SHORT)
        return b"\xc1" + self._random.randbytes(self._random.randrange(200))

    def _damaged(self, body: bytes) -> bytes:
        place = self._random.randrange(len(body))
        what = self._random.randrange(4)
        if what == 0:
            return body[:place]
        if what == 1:
            return body[:place] + self._random.randbytes(1) + body[place + 1 :]
        if what == 2:
            return body[:place] + body[place // 2 :]
        return body[:place] + self._random.choice(_SHORT) + body[place:]
