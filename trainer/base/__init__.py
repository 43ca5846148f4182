"""Settings and errors: what every part of the trainer imports and what imports none of them."""
