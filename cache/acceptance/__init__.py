"""Which tokens are kept: pure rules, the same for every engine. Proofs: docs/exactness.md.

accept_point_mass   a drafted chain                     fresh draws      exact
accept_tree         a drafted tree                      fresh draws      exact
verify_kept         tokens never trained on, kept       q, p in top-K    exact
accept_lenient      SPEC-RL's published rule            q, p of x        biased
"""

from cache.acceptance.kept import Known, Verdicts, accept_lenient, verify_kept
from cache.acceptance.point_mass import accept_point_mass
from cache.acceptance.token_tree import Walks, accept_tree

__all__ = [
    "Known",
    "Verdicts",
    "Walks",
    "accept_lenient",
    "accept_point_mass",
    "accept_tree",
    "verify_kept",
]
