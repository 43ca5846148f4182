"""What the controller costs per sample. See `benchmarks.controller.main`."""
