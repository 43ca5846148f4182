"""Tasks: prompts with answers, built-in or your own, and the built-in model."""
