"""The reward models that a run serves itself, on the CPU: one process for each."""
