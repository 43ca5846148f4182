"""Fused layers and compiled attention, which make the torch engine fast on a CPU."""
