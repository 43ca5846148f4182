"""Records that messages carry and files keep: steps, evaluations, counts."""
