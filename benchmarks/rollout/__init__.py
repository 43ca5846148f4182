"""Rollouts of successive policy versions: ours against what a user could pick instead."""
