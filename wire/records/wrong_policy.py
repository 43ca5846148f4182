"""Reports of a run that samples from another policy than the one that it trains."""

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
    policy_version: int
    """The version that the process claims to sample from; -1: all of them."""
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
    """Compare an engine's weights with the trainer's; None if all that can be compared agree.

    `policy_version` is the version that the engine claims to decode with, `expected` the trainer's
    fingerprint of it; `before` is the engine's previous version and its fingerprint.
    """
    left_out = set(not_compared(expected, found))
    differing = [
        name
        for name, digest in expected.tensors.items()
        if name not in left_out and not digest.agrees_with(found.tensors[name])
    ]
    if not differing:
        return None
    total = len(expected.tensors)
    which = f"all {total} tensors differ"
    if len(differing) < total:
        which = f"{len(differing)} of {total} tensors differ ({listed(differing)})"
    text = (
        f"{generator} decodes with other weights than the trainer has for version {policy_version}:"
        f" {which}{_as_before(differing, found, before)}"
    )
    return WrongPolicy("weights", generator, policy_version, text)


class TokenizerDigest(msgspec.Struct, frozen=True):
    """Digests that are equal for two processes with the same tokenizer."""

    vocabulary: str
    """Digest of the mapping between text and ids, with special tokens: 32 hexadecimal digits."""
    chat_template: str


def compare_tokenizers(
    process: str, *, expected: TokenizerDigest, found: TokenizerDigest
) -> WrongPolicy | None:
    """Compare a process's tokenizer with the one of the prompts; None if they agree."""
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
    """List tensors that cannot be compared: one side lacks them or holds another data type."""
    both = expected.tensors.keys() & found.tensors.keys()
    return sorted(
        (expected.tensors.keys() ^ found.tensors.keys())
        | {name for name in both if expected.tensors[name].dtype != found.tensors[name].dtype}
    )


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _as_before(
    differing: list[str], found: Fingerprint, before: tuple[int, Fingerprint] | None
) -> str:
    """Say if the differing tensors are those of the previous version."""
    if before is None:
        return ""
    version, earlier = before
    known = [name for name in differing if name in earlier.tensors]
    same = [name for name in known if found.tensors[name].agrees_with(earlier.tensors[name])]
    if len(same) == len(differing):
        return f". They still have the numbers of version {version}: they were not installed"
    if same:
        return f". Of these, {listed(same)} still have the numbers of version {version}"
    return f". They do not have the numbers of version {version} either"
