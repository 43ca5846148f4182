"""Samples of several turns: the exchange of a sample with its environment."""
