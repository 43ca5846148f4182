"""Tasks provide prompts with answers, built-in or the user's, and the built-in model."""
