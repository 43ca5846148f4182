"""What follows from a generator's second scoring of its own tokens."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.controller.policy_watch import conclusion
from asyncrl.wire.messages.data import encode_floats, encode_tokens
from asyncrl.wire.messages.from_generator import Rescored
from asyncrl.wire.messages.from_trainer import SuspectSample, WrongPolicyFound
from asyncrl.wire.records.wrong_policy import WrongPolicy

TRAINER, RECORDED = [-1.0, -2.0], [-1.3, -2.3]
OBSERVED = 1
"""Place of a token that no policy has drawn: its log-probabilities are not compared."""


def asked() -> WrongPolicyFound:
    def floats(values: list[float]) -> bytes:
        return encode_floats(np.insert(np.array(values, np.float32), OBSERVED, 0.0))

    tokens, observed = encode_tokens(np.array([1, 9, 2], np.int32)), b"\0\1\0"
    sample = SuspectSample(tokens, tokens, floats(RECORDED), floats(TRAINER), observed)
    wrong = WrongPolicy("unknown", "generator-1", 4, "they differ")
    return WrongPolicyFound(wrong, limit=1e-3, samples=(sample,))


def answer(values: list[float], version: int = 4, reason: str = "") -> Rescored:
    logprobs = np.insert(np.array(values, np.float32), OBSERVED, -9.0) if values else values
    arrays = (encode_floats(logprobs),) if values else ()
    return Rescored("generator-1", 1, version, arrays, reason)


@pytest.mark.parametrize(
    ("given", "cause", "text"),
    [
        (answer(TRAINER), "kv", "drawn on KV that other weights had computed"),
        (answer(RECORDED), "unknown", "computes another policy from the same weights"),
        (answer([-7.0, -7.0]), "unknown", "neither with the trainer (1) nor with what was"),
        (answer([float("nan"), -2.0]), "unknown", "neither with the trainer (0.5)"),
        (answer(TRAINER, version=5), "unknown", "generator-1 has version 5 by now"),
        (answer([], reason="the engine is paused"), "unknown", "again: the engine is paused"),
        (answer([-1.0]), "unknown", "its answer has other lengths"),
    ],
)
def test_the_answer_shows_the_cause(given: Rescored, cause: str, text: str) -> None:
    found = conclusion(asked(), given)
    assert (found.cause, found.generator, found.policy_version) == (cause, "generator-1", 4)
    assert found.text.startswith("they differ; ")
    assert text in found.text
