"""Speed and memory of a training step, against plain transformers and TRL. See `__main__`."""
