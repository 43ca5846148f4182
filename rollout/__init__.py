"""A sample's record, and the rules for which tokens may be trained on.

    trajectory       tokens, the log-probabilities they were drawn with, segments of policy versions
    acceptance/      the rules that decide which tokens are kept; proofs in docs/exactness.md
    jit              compiled kernels and checks of their arguments, which the rules are built on
    truncation, sampled_set, model_parts, cpu     computed alike by engines and the trainer

Exactness depends on this package alone, and an import contract keeps all others out of it
(docs/decisions/0015): they only propose tokens, so an error in them can cost time but never change
what is sampled.
"""

if __name__ == "rollout":
    raise ImportError("asyncrl's package rollout is imported as asyncrl.rollout", name="rollout")
