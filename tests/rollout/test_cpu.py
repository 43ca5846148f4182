"""Functions that engine and trainer compute alike, against numpy in float64."""

from __future__ import annotations

import numpy as np

from asyncrl.rollout import cpu


def test_the_exponential_is_exact_to_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-86.9, 87.9, 200_001), [0.0, -1e-9]]).astype(np.float32)
    got = np.empty((1, len(x)), np.float32)
    cpu.gated(np.concatenate([-x, np.ones_like(x)])[None], got)  # -x / (1 + e^x)
    exact = -x.astype(np.float64) / (1.0 + np.exp(x.astype(np.float64)))
    some = x != 0
    np.testing.assert_allclose(got[0][some], exact[some], rtol=4e-7, atol=1e-44)
    edges = np.array([-np.inf, -1e4, np.inf, np.nan], np.float32)
    assert cpu.exp(edges[0]) == cpu.exp(edges[1]) == 0
    got = np.empty((1, 1), np.float32)
    cpu.gated(np.array([[np.nan, 1.0]], np.float32), got)
    assert np.isnan(got).all(), "an activation that is not a number must not be hidden"
