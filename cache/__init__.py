"""What earlier rollouts said: trajectories, the tree per prompt, drafting and acceptance rules."""
