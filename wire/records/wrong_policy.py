"""What is reported when a run samples from another policy than the one that it trains.

WrongPolicy         one finding: the cause, the process, the version, and a sentence
compare_weights     what an engine decodes with against what the trainer has
compare_tokenizers  what a process has loaded against what the controller has
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from asyncrl.wire.weights.layout import Fingerprint

Cause = Literal["weights", "temperature", "lag", "kv", "tokenizer", "unknown"]
"""Other weights · another temperature · all tokens follow an earlier version · KV of older weights
was reused · another tokenizer or chat template · log-probabilities differ for another reason."""

_SHOWN = 5


class WrongPolicy(msgspec.Struct, frozen=True):
    """One finding."""

    cause: Cause
    generator: str
    """The process that it is about."""
    policy_version: int
    """The version that the process claims to sample from; -1: it is about all of them."""
    text: str
    """A sentence for people: which tensor, which temperature, what to do."""


def compare_weights(
    generator: str,
    policy_version: int,
    *,
    expected: Fingerprint,
    found: Fingerprint,
    before: tuple[int, Fingerprint] | None = None,
) -> WrongPolicy | None:
    """What is wrong with the weights of an engine; None if all that can be compared agree.

    Args:
        generator: whose engine it is.
        policy_version: that the engine says it decodes with.
        expected: the trainer's, of that version.
        found: the engine's.
        before: the version that the engine decoded with before, and its fingerprint.
    """
    differing = [
        name
        for name, digest in expected.tensors.items()
        if name in found.tensors
        and digest.dtype == found.tensors[name].dtype
        and not digest.agrees_with(found.tensors[name])
    ]
    if not differing:
        return None
    text = (
        f"{generator} decodes with other weights than the trainer has for version {policy_version}:"
        f" {_which(differing, len(expected.tensors))}{_as_before(differing, found, before)}"
    )
    return WrongPolicy("weights", generator, policy_version, text)


class TokenizerDigest(msgspec.Struct, frozen=True):
    """What two processes with the same tokenizer have in common."""

    vocabulary: str
    """Of the way from text to ids and back, special tokens included: 32 hexadecimal digits."""
    chat_template: str
    """Of the chat template: 32 hexadecimal digits."""


def compare_tokenizers(
    process: str, *, expected: TokenizerDigest, found: TokenizerDigest
) -> WrongPolicy | None:
    """What is wrong with the tokenizer of a process; None if it is the one of the prompts."""
    parts = []
    if expected.vocabulary != found.vocabulary:
        parts.append("another tokenizer")
    if expected.chat_template != found.chat_template:
        parts.append("another chat template")
    if not parts:
        return None
    text = f"{process} has {' and '.join(parts)} than the run's prompts were made with"
    return WrongPolicy("tokenizer", process, -1, text)


def not_compared(expected: Fingerprint, found: Fingerprint) -> list[str]:
    """Tensors that nobody can compare: one side lacks them or holds another data type."""
    both = expected.tensors.keys() & found.tensors.keys()
    return sorted(
        (expected.tensors.keys() ^ found.tensors.keys())
        | {name for name in both if expected.tensors[name].dtype != found.tensors[name].dtype}
    )


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _which(differing: list[str], total: int) -> str:
    if len(differing) == total:
        return f"all {total} tensors differ"
    return f"{len(differing)} of {total} tensors differ ({listed(differing)})"


def _as_before(
    differing: list[str], found: Fingerprint, before: tuple[int, Fingerprint] | None
) -> str:
    """Whether the differing tensors are those of the version before."""
    if before is None:
        return ""
    version, earlier = before
    same = [
        name
        for name in differing
        if name in earlier.tensors and found.tensors[name].agrees_with(earlier.tensors[name])
    ]
    if len(same) == len(differing):
        return f". They still have the numbers of version {version}: they were not installed"
    if same:
        return f". Of these, {listed(same)} still have the numbers of version {version}"
    return f". They do not have the numbers of version {version} either"
