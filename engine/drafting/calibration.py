"""Maps estimated acceptance probabilities to observed ones, learned while running.

Estimates are compared with outcomes in bins and mapped by a rising curve through the bins, which
are fine where it matters: at a large batch only nodes above 0.97 pay.
"""

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.jit import kernels_of

kernel = kernels_of("engine")

Floats = NDArray[np.float64]

EDGES: Floats = np.array(
    [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995,
     0.998]
)  # fmt: skip
BINS = len(EDGES) + 1
WINDOW: Floats = np.where(np.arange(BINS) < 10, 400.0, 1500.0)
"""Nodes that each bin remembers. With 1,500 a mean of 0.97 has a standard error of 0.004."""
DOUBT = 6.0
"""Weight of the estimate itself, in nodes. More than 1, because nodes of a path fail together."""
RECENT = 80.0
"""Nodes in a bin's recent mean. If it differs clearly, older nodes are forgotten."""
CLEAR_CHANGE = 36.0
"""Squared standard errors of a clear difference, doubled because a path's nodes fail together."""
FADE = 0.999
"""Decay of all bins per batch of outcomes: a bin without new nodes yields to its neighbours."""
_BATCH_CALLS, _BATCH_NODES = 8, 256
"""Outcomes are learned in batches of this many calls or nodes."""

_CENTRES: Floats = (np.concatenate(([0.0], EDGES)) + np.concatenate((EDGES, [1.0]))) / 2


@kernel
def rising(values: Floats, weights: Floats) -> Floats:
    """The closest non-decreasing sequence by weighted squares (pool adjacent violators): `[n]`."""
    means, totals = np.empty(len(values)), np.empty(len(values))
    sizes = np.empty(len(values), np.int64)
    pools = 0
    for i in range(len(values)):
        mean, total, size = values[i], weights[i], 1
        while pools and means[pools - 1] >= mean:
            pools -= 1
            mean = (mean * total + means[pools] * totals[pools]) / (total + totals[pools])
            total += totals[pools]
            size += sizes[pools]
        means[pools], totals[pools], sizes[pools] = mean, total, size
        pools += 1
    return np.repeat(means[:pools], sizes[:pools])


class Calibration:
    """A rising map from estimated to observed probability. It starts as the identity."""

    def __init__(self) -> None:
        # Per bin: nodes, sum of estimates, acceptances; over the window and over recent nodes.
        self._sums = np.zeros((3, BINS))
        self._recent = np.zeros((3, BINS))
        self._waiting: list[tuple[NDArray[np.floating], NDArray[np.bool_]]] = []
        self._waiting_nodes = 0
        self._knots: tuple[Floats, Floats] | None = None

    def judge(self, estimates: NDArray[np.floating], accepted: NDArray[np.bool_]) -> None:
        """Learn outcomes: `[N]` estimates of nodes that were fed, and `[N]` whether accepted."""
        self._waiting.append((np.array(estimates), np.array(accepted)))
        self._waiting_nodes += len(estimates)
        if len(self._waiting) >= _BATCH_CALLS or self._waiting_nodes >= _BATCH_NODES:
            estimates = np.concatenate([one for one, _ in self._waiting])
            accepted = np.concatenate([one for _, one in self._waiting])
            self._waiting.clear()
            self._waiting_nodes = 0
            self._learn(np.clip(np.nan_to_num(estimates), 0.0, 1.0), accepted)

    def apply(self, estimates: NDArray[np.floating]) -> Floats:
        """Map estimates to observed acceptance rates `[N]` in [0, 1]."""
        return np.asarray(np.interp(estimates, *self._curve()))

    def optimistic(self, estimates: NDArray[np.floating]) -> Floats:
        """Do `apply`, but never return less than the estimate: an optimism to explore with."""
        return np.asarray(np.maximum(self.apply(estimates), estimates))

    def _learn(self, estimates: NDArray[np.floating], accepted: NDArray[np.bool_]) -> None:
        bins = np.searchsorted(EDGES, estimates, side="right")
        weights = None, estimates, accepted
        new = np.stack([np.bincount(bins, weights=one, minlength=BINS) for one in weights])
        self._sums *= FADE
        for sums, window in (self._sums, WINDOW), (self._recent, RECENT):
            sums *= np.maximum(1.0 - new[0] / window, 0.1)
            sums += new
        self._forget_changed_bins()
        self._knots = None

    def _forget_changed_bins(self) -> None:
        nodes, recent = np.maximum(self._sums[0], 1e-9), np.maximum(self._recent[0], 1e-9)
        now, ever = self._recent[2] / recent, self._sums[2] / nodes
        middle = (now + ever) / 2
        variance = np.maximum(middle * (1.0 - middle), 0.01) / recent
        changed = ((now - ever) ** 2 > CLEAR_CHANGE * variance) & (recent > 20.0)
        if changed.any():
            # The drafter changed, so the other bins are trusted less, too.
            self._sums *= np.minimum(RECENT / 2 / nodes, 1.0)
            self._sums[:, changed] = self._recent[:, changed]

    def _curve(self) -> tuple[Floats, Floats]:
        if self._knots is None:
            nodes, estimated, accepted = self._sums
            mean = np.where(nodes > 0, estimated / np.maximum(nodes, 1e-9), _CENTRES)
            value = (accepted + DOUBT * mean) / (nodes + DOUBT)
            smooth = rising(value, nodes + DOUBT)
            self._knots = np.concatenate(([0.0], mean)), np.concatenate(([0.0], smooth))
        return self._knots
