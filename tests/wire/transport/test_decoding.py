"""Whatever the bytes are, the decoding boundary returns a message or raises FrameRefused."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hostile_frames import CORPUS
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.trajectory import SampleId, Segment
from asyncrl.wire.messages import (
    control,
    data,
    from_generator,
    from_trainer,
    to_generator,
    to_trainer,
)
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused, Reason

UNIONS = {
    "from generator": from_generator.FromGenerator,
    "from trainer": from_trainer.FromTrainer,
    "to generator": to_generator.ToGenerator,
    "to trainer": to_trainer.ToTrainer,
    "delivery": data.FromGeneratorData,
    "acknowledgement": data.ToGeneratorData,
    "request": control.Request,
    "reply": control.Reply,
}
DECODERS = [FrameDecoder(union, max_bytes=1 << 16) for union in UNIONS.values()]
MESSAGES = [
    msgspec.msgpack.encode(message)
    for message in (
        from_generator.SampleFinished("g", SampleId(1, 2), 3, 4, "stop", b""),
        from_generator.SampleFailed("g", SampleId(1, 2), "the reason", user_error=False),
        to_generator.Generate(
            SampleId(1, 2), to_generator.PromptPayload("p", b"\0" * 4, {"a": [1, {"b": None}]}), 7
        ),
        to_trainer.StepPlan(3, (1, 2)),
        data.TrajectoryDelivery(
            1,
            SampleId(1, 2),
            "p",
            b"",
            b"",
            b"",
            b"",
            (Segment(1, 0, 2),),
            "stop",
            1.0,
        ),
        control.StatusReply({"run": "x", "processes": {"trainer": {"state": "ready"}}}),
        control.ViewReply({"step": 7, "recent_rewards": [0.5, 1.0]}),
    )
]


def accept(body: bytes) -> None:
    for decoder in DECODERS:
        with contextlib.suppress(FrameRefused):
            assert isinstance(decoder.decode(body), msgspec.Struct)


@pytest.mark.parametrize("body", CORPUS.values(), ids=CORPUS.keys())
def test_the_corpus_is_refused(body: bytes) -> None:
    with pytest.raises(FrameRefused):
        FrameDecoder(from_generator.FromGenerator, max_bytes=1 << 16).decode(body)
    accept(body)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("string not UTF-8", Reason.NOT_TEXT),
        ("deep unknown field", Reason.TOO_DEEP),
        ("too long", Reason.TOO_LONG),
        ("unknown tag", Reason.UNEXPECTED),
        ("huge list", Reason.UNEXPECTED),
        ("cut short", Reason.MALFORMED),
    ],
)
def test_a_refusal_says_why(what: str, reason: Reason) -> None:
    union = from_generator.FromGenerator | control.StatusRequest
    with pytest.raises(FrameRefused) as refused:
        FrameDecoder(union, max_bytes=1 << 17 if reason is Reason.TOO_DEEP else 1 << 16).decode(
            CORPUS[what]
        )
    assert refused.value.reason is reason


@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    accept(body)


@settings(max_examples=300)
@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages(message: bytes, draw: st.DataObject) -> None:
    body = bytearray(message)
    for _ in range(draw.draw(st.integers(1, 4))):
        place = draw.draw(st.integers(0, len(body)))
        body[place : place + draw.draw(st.integers(0, 3))] = draw.draw(st.binary(max_size=4))
    accept(bytes(body))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
TAGS = [kind for union in UNIONS.values() for kind in getattr(union, "__args__", (union,))]


@settings(max_examples=300)
@given(st.sampled_from(TAGS), st.data())
def test_right_tags_with_any_fields(kind: type[msgspec.Struct], draw: st.DataObject) -> None:
    fields = {name: draw.draw(VALUES) for name in kind.__struct_fields__}
    accept(msgspec.msgpack.encode({"type": kind.__struct_config__.tag, **fields}))
