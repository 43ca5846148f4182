"""The acceptance rules: pure functions, the same for every engine.

Proofs: docs/exactness.md.

                judges                          by                                is
accept_chain    a drafted chain                 fresh draws                       exact
accept_tree     a drafted tree                  fresh draws                       exact
verify_kept     kept tokens never trained on    top-K of the old and new policy   exact
accept_lenient  kept tokens (SPEC-RL's rule)    old and new probability           biased
"""

from rollout.acceptance.chain import accept_chain
from rollout.acceptance.kept import TopKDistributions, Verdicts, accept_lenient, verify_kept
from rollout.acceptance.token_tree import AcceptedPaths, accept_tree

__all__ = [
    "AcceptedPaths",
    "TopKDistributions",
    "Verdicts",
    "accept_chain",
    "accept_lenient",
    "accept_tree",
    "verify_kept",
]
