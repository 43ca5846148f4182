"""The generator process: samples from the first command to the acknowledged delivery."""
