"""What it costs to bring a finished trajectory from its generator to the trainer."""
