"""Asynchronous RL post-training on data that is exactly on-policy: CLI, configuration, processes."""
