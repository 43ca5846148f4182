"""What a generator's second scoring of its own tokens says about the first."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from asyncrl.rollout.trajectory import BoolArray, FloatArray
from asyncrl.wire.messages.frames import decode_floats, decode_tokens
from asyncrl.wire.messages.from_generator import Rescored
from asyncrl.wire.messages.from_trainer import SuspectSample, WrongPolicyFound
from asyncrl.wire.records.wrong_policy import Cause, WrongPolicy


def conclusion(asked: WrongPolicyFound, answer: Rescored) -> WrongPolicy:
    """The finding with its cause, where the answer shows it.

    The engine has scored the samples without any cached KV. If it agrees with the trainer now, the
    tokens were drawn on other KV: that of older weights. If it agrees with what it recorded, it
    computes another policy than the trainer from the same weights, tokens and temperature.
    """
    found = asked.found
    lengths = [len(sample.tokens) for sample in asked.samples]
    if [len(one) for one in answer.logprobs] != lengths:
        why = answer.reason or "its answer has other lengths"
        return _with(found, "unknown", f"{found.generator} could not score them again: {why}")
    if answer.policy_version != found.policy_version:
        return _with(
            found,
            "unknown",
            f"{found.generator} has version {answer.policy_version} by now and cannot score them "
            "again",
        )
    drawn = np.concatenate([_drawn(sample) for sample in asked.samples])
    again = _joined(answer.logprobs)[drawn]
    from_trainer = _mean_gap(again, _joined(one.expected for one in asked.samples)[drawn])
    from_itself = _mean_gap(again, _joined(one.recorded for one in asked.samples)[drawn])
    if from_trainer <= asked.limit:
        return _with(
            found,
            "kv",
            "scored again without cached KV, the same tokens agree with the trainer within "
            f"{from_trainer:.2g}: they were drawn on KV that other weights had computed",
        )
    if from_itself <= asked.limit:
        return _with(
            found,
            "unknown",
            f"scored again without cached KV, they agree with what was recorded within "
            f"{from_itself:.2g}: the engine computes another policy from the same weights (its "
            "positions, its attention or its head)",
        )
    return _with(
        found,
        "unknown",
        f"scored again without cached KV, they agree neither with the trainer ({from_trainer:.2g}) "
        f"nor with what was recorded ({from_itself:.2g})",
    )


def _with(found: WrongPolicy, cause: Cause, text: str) -> WrongPolicy:
    return msgspec.structs.replace(found, cause=cause, text=f"{found.text}; {text}")


def _drawn(sample: SuspectSample) -> BoolArray:
    """`[L]` the tokens that a policy has drawn."""
    observed = sample.observed or bytes(len(decode_tokens(sample.tokens)))
    drawn: BoolArray = np.frombuffer(observed, np.uint8) == 0
    return drawn


def _joined(arrays: Iterable[bytes]) -> FloatArray:
    return np.concatenate([decode_floats(one) for one in arrays])


def _mean_gap(one: FloatArray, other: FloatArray) -> float:
    gap = np.abs(one.astype(np.float64) - other)
    return float(np.minimum(np.nan_to_num(gap, nan=1.0, posinf=1.0), 1.0).mean())
