"""A run's folder: what lies where, who has it open, and how runs are found, listed and resumed."""
