"""Processes of real runs are killed at random moments: what it costs, and that nothing is lost."""
