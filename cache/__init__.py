"""The tree of earlier rollouts per prompt, and drafting from it. It may only change speed."""
