"""The noise floor: tokens that verification rejects although the weights have not changed.

Engines decode with other kernels than they score with, so the probabilities of one policy differ in
their last bits, and verification rejects a few tokens of the very policy that verifies them.

    >>> two = NoiseFloor(samples=2, cut_samples=1, judged=100, rejected=4, abs_mean=1e-3)
    >>> (two + NoiseFloor(samples=1, judged=100, abs_mean=0.0)).share
    0.02
"""

import math
from typing import Self

import msgspec

from asyncrl.wire.transport.decoding import Amount, Count


class NoiseFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Responses that were verified again under the policy that drew them. Measurements add."""

    samples: Count = 0
    cut_samples: Count = 0
    judged: Count = 0
    """Tokens of these responses, without those that an earlier verification had accepted."""
    rejected: Count = 0
    """Rejected tokens: from the first rejected one of a response to its end."""
    abs_mean: Amount | None = None
    """Mean absolute difference, over the accepted tokens, of the log-probability in drawing and in
    verification, in nats. About twice the total variation between the two distributions. None: no
    token was accepted."""
    square_mean: Amount | None = None
    """Mean square of the same differences. None: no token was accepted, or a run that began with an
    older version has not measured it."""

    def __post_init__(self) -> None:
        if self.rejected > self.judged:
            raise ValueError(
                f"{self.rejected} rejected tokens are more than {self.judged} judged ones"
            )
        if self.cut_samples > self.samples:
            raise ValueError(
                f"{self.cut_samples} cut responses are more than {self.samples} samples"
            )

    def whole_share(self, tokens: int) -> float | None:
        """Return the share of responses of this length that verification keeps whole, 0 to 1.

        None if nothing was measured. The weights are unchanged. The logarithm of the ratio of a
        response's two probabilities is a sum of differences of mean square s: about normal with
        variance s N and mean -s N / 2. The block rule accepts with the expectation of min(1,
        ratio), which is 2 (1 - Phi(sqrt(s N) / 2)).
        """
        if self.square_mean is None:
            return None
        return math.erfc(math.sqrt(self.square_mean * tokens / 8))

    @property
    def accepted(self) -> int:
        """Number of accepted tokens."""
        return self.judged - self.rejected

    @property
    def share(self) -> float | None:
        """Share of the judged tokens that were rejected, 0 to 1; None if none was judged."""
        return self.rejected / self.judged if self.judged else None

    def __add__(self, other: Self) -> Self:
        """Merge; `abs_mean` and `square_mean` are means over all accepted tokens."""
        accepted = self.accepted + other.accepted
        total = sum(one.accepted * (one.abs_mean or 0.0) for one in (self, other))
        squared = [one for one in (self, other) if one.square_mean is not None]
        squares = sum(one.accepted * (one.square_mean or 0.0) for one in squared)
        counted = sum(one.accepted for one in squared)
        return type(self)(
            samples=self.samples + other.samples,
            cut_samples=self.cut_samples + other.cut_samples,
            judged=self.judged + other.judged,
            rejected=self.rejected + other.rejected,
            abs_mean=total / accepted if accepted else None,
            square_mean=squares / counted if counted else None,
        )
