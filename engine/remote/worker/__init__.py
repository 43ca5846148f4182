"""The part of a remote engine that runs in the model's process."""
