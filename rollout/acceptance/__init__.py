"""The acceptance rules: pure functions, the same for every engine. Proofs: docs/exactness.md.

                judges                          by                                is
accept_chain    a drafted chain                 fresh draws                       exact
accept_tree     a drafted tree                  fresh draws                       exact
verify_kept     kept tokens never trained on    the symbols of both policies      exact
accept_lenient  kept tokens (SPEC-RL's rule)    old and new probability           biased
"""

from asyncrl.rollout.acceptance.kept import (
    MASS_TOLERANCE,
    Verdicts,
    accept_lenient,
    symbols_of,
    verify_kept,
    warm_up_verification,
)
from asyncrl.rollout.acceptance.token_tree import AcceptedPaths, accept_chain, accept_tree

__all__ = [
    "MASS_TOLERANCE",
    "AcceptedPaths",
    "Verdicts",
    "accept_chain",
    "accept_lenient",
    "accept_tree",
    "symbols_of",
    "verify_kept",
    "warm_up_verification",
]
