"""The tree of rollouts in one process: insertion, matching, drafts, and estimates."""
