"""asyncrl next to what a user would pick instead: TRL's GRPO and a plain synchronous loop."""
