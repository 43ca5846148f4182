"""Real runs, and statistics that say whether what they trained on is what they claim."""
