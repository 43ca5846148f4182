"""Whether the whole loop hands the trainer what it promises, with every part real."""
