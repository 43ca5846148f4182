"""Models that are tried in this process: one of its own would import torch, for four seconds."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from asyncrl.startup import loading_trial, model_check


def tried(model: Path) -> loading_trial.Loaded:
    """In the place of `model_check.tried`."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    try:
        return loading_trial.load(model)
    finally:
        logging.set_verbosity(verbosity)


def try_here(folder: Path, cache_home: Path | None = None) -> None:
    """Keep what comes of a model's trial for the commands that run it.

    Args:
        folder: of the model.
        cache_home: the `XDG_CACHE_HOME` of the commands; None: that of this process.
    """
    home = {} if cache_home is None else {"XDG_CACHE_HOME": str(cache_home)}
    with mock.patch.dict(os.environ, home), mock.patch.object(model_check, "tried", tried):
        model_check.check_files(folder)
