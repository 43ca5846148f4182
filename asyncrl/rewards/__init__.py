"""Rewards by name or by your own function, scored in worker processes."""
