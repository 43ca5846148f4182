"""Common parts of the fused layers of the torch engine and of the trainer on a CPU."""
