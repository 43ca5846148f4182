"""Training: the learner, algorithms, sequence packing and checkpoints."""
