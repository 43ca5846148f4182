"""The trainer process: trajectories in, optimizer steps, new weights and checkpoints out."""
