"""What a sample is, and which of its tokens may be trained on. Imports nothing of the rest.

trajectory    tokens, the log-probabilities they were drawn with, segments of policy versions
acceptance/   the rules that decide which tokens stay, with their proofs in docs/exactness.md

Exactness depends on this package alone: the tree, the estimates and the planner only propose
tokens, so an error in them can cost time and never change what is sampled. The import contract
keeps them out of here.
"""
