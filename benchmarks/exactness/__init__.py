"""Which modes sample exactly from the policy, and how biased the others are."""
