"""Whether the whole loop delivers what it promises to the trainer, with every part real."""
