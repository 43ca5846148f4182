"""What the tests of the whole loop state of samples, whichever engine drew them.

Policies are as far apart as can be: a sample then shows as much as eight do with those of
`whole_loop.modes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from false_alarms import Claims
from whole_loop import statements
from whole_loop.modes import (
    MODES,
    PROMPTS,
    Mode,
    ResponseDistributions,
    ResponseSpace,
    make_policies,
)
from whole_loop.outcome import Delivered
from whole_loop.statements import TOLERANCE, Finding


def far_apart(name: str, **changes: Any) -> Mode:
    """A mode whose policies are far apart, unless all versions have the same weights.

    Args:
        name: of the mode.
        changes: to other fields.
    """
    mode = MODES[name]
    return replace(mode, drift=1.0 if mode.drift else 0.0, **changes)


@cache
def policies_of(drift: float) -> list[Any]:
    return make_policies(drift)


@cache
def known(drift: float, space: ResponseSpace) -> ResponseDistributions:
    return ResponseDistributions(policies_of(drift), PROMPTS, space)


def distributions_of(mode: Mode) -> ResponseDistributions:
    return known(mode.drift, mode.space)


def found(mode: Mode, delivered: Sequence[Delivered]) -> Finding:
    """Everything that a mode promises, of these samples. `p_value` of it is that of the worst."""
    finding = statements.check(mode, delivered, distributions_of(mode))
    for what, verdict in finding.verdicts.items():
        print(f"{what}: {verdict}")
    return finding


def assert_exact(
    claims: Claims, mode: Mode, delivered: Sequence[Delivered], engine: str = "torch"
) -> None:
    """Samples are what their mode promises. Takes 7 p-values, or 2 of a mode with k = 1."""
    finding = found(mode, delivered)
    for what, verdict in finding.verdicts.items():
        assert claims.fit(verdict.p_value), f"{what}: {verdict}"
    assert finding.staleness == (0 if mode.whole else 1)
    assert finding.worst_logprob < TOLERANCE[engine]
    assert statements.rewards_match(delivered)
