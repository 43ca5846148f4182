"""Asynchronous RL post-training on exactly on-policy data: CLI, configuration, processes."""
