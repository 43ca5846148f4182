"""What every part of the trainer imports and what imports none of them: settings and errors."""
