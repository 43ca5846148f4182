"""Which tokens are kept: pure rules, the same for every engine. Proofs: docs/exactness.md.

accept_chain        a drafted chain                     fresh draws      exact
accept_tree         a drafted tree                      fresh draws      exact
verify_kept         tokens never trained on, kept       q, p in top-K    exact
accept_lenient      SPEC-RL's published rule            q, p of x        biased
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
