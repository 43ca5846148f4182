"""One run, from its configuration to its result: the controller's process."""
