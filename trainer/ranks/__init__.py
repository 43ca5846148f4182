"""Several processes, the ranks, that train one model together (docs/trainer.md, decision 0057)."""

from asyncrl.trainer.ranks.world import ALONE, World

__all__ = ["ALONE", "World"]
