"""Rewards by name or by the user's own function, scored in a bounded pool of processes."""
