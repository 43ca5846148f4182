"""Samples of several turns: what a sample and its environment have said to each other."""
