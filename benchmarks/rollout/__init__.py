"""Rollouts of successive policy versions: our engines against the alternatives of a user."""
