"""Refuse sequences that are longer than the model reads, before anything is made or started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import ModelError, UserError
from asyncrl.tasks.warm_start_recipe import POSITIONS

_BY_LENGTH = {"dynamic", "longrope", "su"}
"""Kinds of rotary embedding that have other angles in long sequences; su is longrope's old name."""
_ORIGINAL = "original_max_position_embeddings"


def description_of(directory: Path, setting: str) -> dict[str, Any]:
    """What config.json says, of a nested model its text part; empty if it is not here.

    Raises:
        ModelError: it is no JSON; `setting` is the one that names the directory.
    """
    file = directory / "config.json"
    try:
        found = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{setting}: {file} is not JSON: {error}") from error
    text = found.get("text_config", found)
    return text if isinstance(text, dict) else {}


def check_builtin_positions(config: RunConfig) -> None:
    """Refuse what no built-in model reads, before one is made. Raises UserError."""
    if config.model.path.startswith("builtin:"):
        _check(config, POSITIONS)


def check_positions(config: RunConfig, model: Path) -> None:
    """Refuse what the embedded engine's model does not read. Raises UserError.

    vLLM and SGLang have rules of their own for models whose positions are scaled.
    """
    described = description_of(model, "model.path")
    if any(engine.kind == "torch" for engine in config.engines):
        longest = described.get("max_position_embeddings")
        if isinstance(longest, int):
            _check(config, longest)
    _check_angles(config, described)


def _check_angles(config: RunConfig, described: dict[str, Any]) -> None:
    """Refuse lengths at which rotary angles are those of a batch, not of a position."""
    wanted = config.engine.max_model_len
    found = described.get("rope_parameters") or described.get("rope_scaling") or {}
    for one in (found, *found.values()):  # of some models one for each kind of layer
        kind = one.get("rope_type", one.get("type")) if isinstance(one, dict) else None
        if kind not in _BY_LENGTH:
            continue
        of_model = described.get("max_position_embeddings")
        of_training = one.get(_ORIGINAL, described.get(_ORIGINAL, of_model))
        limit = of_model if kind == "dynamic" else of_training
        if isinstance(limit, int) and wanted > limit:
            raise UserError(
                f"engine.max_model_len: with {wanted:,} tokens the positions of {config.model.path}"
                f" (rope_type: {kind}) are scaled by the longest sequence of a batch, so a token's "
                f"probability depends on what is computed next to it, in engine and trainer; set "
                f"it to {limit}, up to which they are not, or choose another model"
            )


def _check(config: RunConfig, longest: int) -> None:
    wanted = config.engine.max_model_len
    if wanted > longest:
        raise UserError(
            f"engine.max_model_len: {wanted:,} tokens are more than {config.model.path} reads, "
            f"which are {longest:,}; set it to {longest}, or choose another model"
        )
