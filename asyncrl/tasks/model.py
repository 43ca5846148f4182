"""Finds the model to train: the user's, or a built-in one, trained on first use and cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import ModelError, UserError
from asyncrl.suggestions import looked_from, nearest_path
from asyncrl.tasks.builtin.tokenizer import END, builtin_tokenizer, make_tokenizer, vocabulary_of
from asyncrl.tasks.builtin.warm_start_recipe import AGENT_RECIPE, RECIPE, WarmStart, recipe_fields
from asyncrl.tasks.config import ModelConfig
from asyncrl.tasks.data import hub
from asyncrl.trainer.checkpoint.export_files import is_checkpoint

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["END", "builtin_tokenizer", "default_cache_dir", "ensure_builtin_model", "resolve_model"]

log = logging.getLogger(__name__)

BUILTIN_ARITHMETIC = "builtin:arithmetic"
BUILTIN_AGENT = "builtin:agent"

_TELL_SECONDS = 20.0
"""Silence without a terminal while the built-in model is trained."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def resolve_model(config: ModelConfig, progress: Progress | None) -> str:
    """Return the model that engines and trainer load: a checked directory or a hub id.

    Without the hub, an id becomes the model's directory in the hub's cache. Raises ModelError if
    the directory is missing or lacks config.json, the tokenizer or the weights, and the path is not
    a hub id.
    """
    path = config.path
    recipes = {BUILTIN_ARITHMETIC: RECIPE, BUILTIN_AGENT: AGENT_RECIPE}
    if path in recipes:
        return str(ensure_builtin_model(default_cache_dir(), progress, recipes[path]))
    if path.startswith("builtin:"):
        raise ModelError(
            f"model.path: there is no model {path!r}; the built-in ones are "
            f"{BUILTIN_ARITHMETIC!r} and {BUILTIN_AGENT!r}"
        )
    directory = Path(path)
    if directory.is_dir():
        directory = _of_checkpoint(directory, progress)
        check_directory(directory)
        return str(directory.resolve())
    if directory.is_file():
        raise ModelError(f"model.path: {path!r} is a file; give the directory that holds it")
    if not hub.is_id(path):
        raise ModelError(
            f"model.path: there is no directory {path!r} {looked_from()}; give a model directory, "
            f"a hub id such as Qwen/Qwen3-0.6B, or {BUILTIN_ARITHMETIC!r}.{nearest_path(directory)}"
        )
    without_hub = hub.unusable()
    if without_hub is None:
        return path
    cached = hub.cached_model(path)
    if cached is None:
        raise ModelError(hub.not_found(path, "model.path", "model directory", without_hub))
    check_directory(cached)
    return str(cached)


def _of_checkpoint(directory: Path, progress: Progress | None) -> Path:
    """Return the exported model if this is a checkpoint of a run, or the folder `model` of one."""
    if directory.name == "model" and not any(directory.glob("*.safetensors")):
        directory = directory.parent if is_checkpoint(directory.parent) else directory
    if not is_checkpoint(directory):
        return directory
    from asyncrl.tasks.exported_model import model_of

    say = log.info if progress is None else progress.console.print
    try:
        return model_of(directory.resolve(), say)
    except UserError as error:
        raise ModelError(f"model.path: {error}") from error


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/asyncrl` (`~/.cache/asyncrl`). Raises ModelError without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "asyncrl"
    except RuntimeError as error:  # neither HOME nor an entry of this user in /etc/passwd
        raise ModelError(
            "the built-in model cannot be cached: this user does not have a home folder; set "
            "XDG_CACHE_HOME to a writable folder"
        ) from error


def ensure_builtin_model(
    cache_dir: Path, progress: Progress | None = None, recipe: WarmStart = RECIPE
) -> Path:
    """Return the built-in model's directory; train it first (half a minute) if it is not cached.

    The model is saved to a temporary directory and renamed, so an interrupted or concurrent call
    leaves nothing incomplete. Raises ModelError if the cache directory is not writable.
    """
    place = cache_dir / f"{recipe.task}-{_recipe_hash(recipe)}"
    if place.is_dir():
        return place
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=cache_dir))
    except OSError as error:
        raise ModelError(
            f"the built-in model cannot be cached in {cache_dir}: {error}; set XDG_CACHE_HOME to a "
            "writable folder"
        ) from error
    try:
        _make(making, recipe, progress)
        making.chmod(0o755)
        _move(making, place)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return place


def _make(directory: Path, recipe: WarmStart, progress: Progress | None) -> None:
    bar = None
    if progress is not None:
        bar = progress.add_task("Warm start of the built-in model (first use)", total=recipe.steps)
        if progress.disable:  # no terminal
            some = "half a minute to a few" if recipe.task == "arithmetic" else "several"
            text = (
                f"training the built-in model first (once): {recipe.steps:,} steps, {some} minutes"
            )
            progress.console.print(text, soft_wrap=True, highlight=False)
    log.info("training the built-in model: %d supervised steps", recipe.steps)
    from asyncrl.tasks.builtin.warm_start import warm_start  # imports torch, which takes seconds

    tokenizer = make_tokenizer(vocabulary_of(recipe.task))
    told = time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal told
        if progress is None or bar is None:
            return
        progress.update(bar, completed=done, total=total)
        if progress.disable and time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            progress.console.print(f"{done:,} of {total:,} steps", highlight=False)

    with no_transformers_bars():
        result = warm_start(tokenizer, recipe, advance)
        result.model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    record = {
        "sampled_accuracy": result.sampled_accuracy,
        "seconds": round(result.seconds, 2),
        "steps": result.steps,
        "recipe": recipe_fields(recipe),
    }
    (directory / "warm_start.json").write_text(json.dumps(record, indent=2) + "\n")
    accuracy = result.sampled_accuracy
    shown = "" if accuracy is None else f"; sampled accuracy {accuracy:.2f}"
    log.info("trained the built-in model in %.0f s%s", result.seconds, shown)


@contextlib.contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Hide the progress bars of transformers for saving and loading models."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _move(source: Path, place: Path) -> None:
    try:
        source.rename(place)
    except OSError:
        # Another process was faster: a directory cannot be renamed onto one that is not empty.
        if not place.is_dir():
            raise


def _recipe_hash(recipe: WarmStart) -> str:
    v = vocabulary_of(recipe.task)
    content = [recipe_fields(recipe), v.special, v.characters, v.words, v.chat_template]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def check_directory(directory: Path, setting: str = "model.path") -> None:
    """Refuse an existing folder that is not a model directory.

    Raises ModelError, naming the user's `setting`, if config.json or the tokenizer is missing.
    (`model_check` checks the weights.)
    """
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise ModelError(
                f"{setting}: {directory} is a PEFT adapter, not a whole model; give its base model "
                "here, and the adapter as trainer.lora.adapter"
            )
        raise ModelError(
            f"{setting}: {directory} is not a HF model directory: config.json is missing; save the "
            "model with model.save_pretrained(directory)"
        )
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{setting}: {directory} does not have a tokenizer ({', '.join(_TOKENIZER_FILES)}); "
            "save it there with tokenizer.save_pretrained(directory)"
        )
