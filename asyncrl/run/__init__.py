"""The controller's process: one run, from its configuration to its result."""
