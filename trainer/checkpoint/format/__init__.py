"""The files of a checkpoint: names, manifest, the index of its tensors, and disk errors."""
