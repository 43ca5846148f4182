"""The tree of earlier rollouts per prompt, and drafting from it. It can only change speed."""
