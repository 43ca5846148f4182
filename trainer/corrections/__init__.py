"""Corrections: weights for tokens that another policy drew than the one that trains on them.

With g = log of current over behaviour probability of a token, and sums and means over its sample:

    name                  weight of a token                               source
    token_truncated       min(e^g, cap)                                   Ionides 2008; 1802.01561
    token_masked          e^g inside the band, else 0                     IcePop, 2510.18855
    sequence_truncated    min(e^(sum g), cap)                             Ionides 2008
    sequence_masked       e^(sum g) inside the band, else 0
    sequence_rejected     min(e^g, cap) where e^(mean g) is in the band, else 0
    none                  1

A token that is left out stays in the loss's denominator: a step that leaves out much is smaller,
not noisier. On-policy g is rounding, every weight is 1, and nothing is left out.
"""

from __future__ import annotations

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.corrections.base import (
    Correction,
    SequenceMasked,
    SequenceRejected,
    SequenceTruncated,
    TokenMasked,
    TokenTruncated,
    Uncorrected,
)

__all__ = ["make"]


def make(config: TrainerConfig) -> Correction:
    """Return the configured correction."""
    low, high = config.band_of_correction
    cap = config.importance_cap
    made: dict[str, Correction] = {
        "none": Uncorrected(),
        "token_truncated": TokenTruncated(cap),
        "token_masked": TokenMasked(low, high),
        "sequence_truncated": SequenceTruncated(cap),
        "sequence_masked": SequenceMasked(low, high),
        "sequence_rejected": SequenceRejected(low, high, cap),
    }
    return made[config.correction]
