"""What the fused layers of the torch engine and of the trainer share on a CPU."""
