"""Exactly on-policy at which price: real runs in every mode, one after the other."""
