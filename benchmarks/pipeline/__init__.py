"""The price of exactly on-policy data: real runs in every mode, one after the other."""
