"""The learner: algorithms, packing, gradient accumulation, checkpoints and weight publishing."""
