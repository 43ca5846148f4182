"""Generators: one small protocol, and the engines behind it (embedded torch, vLLM)."""
