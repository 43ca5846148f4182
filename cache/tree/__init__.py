"""The tree of rollouts in one process: insertion, matching, drafts, and what they are worth."""
