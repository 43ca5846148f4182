"""The child processes of a run: what starts them, the generator and the trainer."""
