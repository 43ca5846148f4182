"""Training: the learner, algorithms, sequence packing and checkpoints."""

if __name__ == "trainer":
    raise ImportError("asyncrl's package trainer is imported as asyncrl.trainer", name="trainer")
