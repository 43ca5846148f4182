"""Tasks: prompts with answers, the built-in one or the user's own, and the built-in model."""
