"""The built-in model in miniature: trained in a moment, and wrong about everything."""

from __future__ import annotations

from asyncrl.tasks.warm_start_recipe import WarmStart

TINY = WarmStart(
    hidden_size=32,
    intermediate_size=32,
    heads=1,
    head_dim=32,
    steps=4,
    batch_size=4,
    dev_problems=8,
    expected=(0.0, 1.0),
)
