"""The child processes of a run: generator, trainer, and how they are started."""
