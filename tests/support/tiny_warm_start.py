"""A built-in model that costs no training, and is wrong about everything."""

from __future__ import annotations

from pathlib import Path

from tried_here import try_here

from asyncrl.tasks import model
from asyncrl.tasks.builtin.tokenizer import make_tokenizer, vocabulary_of
from asyncrl.tasks.builtin.warm_start import new_model
from asyncrl.tasks.builtin.warm_start_recipe import WarmStart


def place_untrained(cache_home: Path, recipe: WarmStart) -> None:
    """Put the model of a recipe, untrained, where runs with this `XDG_CACHE_HOME` look for it.

    It has been tried (`try_here`).
    """
    folder = cache_home / "asyncrl"
    place = folder / f"{recipe.task}-{model._recipe_hash(recipe)}"
    tokenizer = make_tokenizer(vocabulary_of(recipe.task))
    new_model(tokenizer, recipe).save_pretrained(folder / "made")
    tokenizer.save_pretrained(folder / "made")
    (folder / "made").rename(place)
    try_here(place, cache_home)
