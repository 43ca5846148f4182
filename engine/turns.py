"""Where turns begin and end among tokens of which some were observed.

A response of several turns has generated and observed tokens in turn. What ends a turn, a stop
token or a stop string, is part of the response, and observed tokens follow it. So only what was
generated after the last observed token can end the response.
"""

from __future__ import annotations

import numpy as np

from asyncrl.rollout.trajectory import BoolArray, ByteArray, KeptTokens, Provenance


def turn_start(observed: BoolArray, count: int) -> int:
    """Of the first `count` tokens, those of earlier turns: up to the last observed one.

    Args:
        observed: `[L]` as in `KeptTokens`, L >= count.
        count: of tokens.
    """
    places = np.flatnonzero(observed[:count])
    return int(places[-1]) + 1 if len(places) else 0


def turn_end(observed: BoolArray, begin: int) -> int:
    """The place of the first observed token from `begin` on; L if there is none."""
    places = np.flatnonzero(observed[begin:])
    return begin + int(places[0]) if len(places) else len(observed)


def provenance_of(kept: KeptTokens, accepted: int) -> ByteArray:
    """`[accepted]` of `Provenance`: what the first kept tokens are reported as."""
    observed = kept.observed[:accepted]
    return np.where(observed, Provenance.OBSERVED, Provenance.VERIFIED).astype(np.uint8)
