"""A run's folder: its layout and lock, and how runs are found, listed and resumed."""
