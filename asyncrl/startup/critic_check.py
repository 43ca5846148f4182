"""Refuse a critic that cannot judge the policy's tokens, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import ModelError, UserError
from asyncrl.startup.model_check import check_files
from asyncrl.startup.positions_check import description_of
from asyncrl.tasks.model import check_directory
from asyncrl.tasks.model_tokenizer import load_tokenizer, tokenizer_digest

_SETTING = "trainer.critic.model"


def with_critic(config: RunConfig, model_path: str, tokenizer: Any) -> RunConfig:
    """The configuration with the critic's directory as an absolute path.

    Args:
        config: of the run.
        model_path: directory of the policy, or its id on the hub.
        tokenizer: the policy's.

    Raises:
        UserError: the critic is no model directory, has another vocabulary or tokenizer than the
            policy, or reads shorter sequences than the run has.
    """
    given = config.trainer.critic.model
    if given is None:
        return config
    directory = Path(given)
    if not directory.is_dir():
        raise ModelError(
            f"{_SETTING}: there is no directory {given!r} (looked from {Path.cwd()}); give a "
            "Hugging Face model directory, or leave it out to start from model.path"
        )
    check_directory(directory, _SETTING)
    check_files(directory, _SETTING, needs_head=False)
    described = description_of(directory, _SETTING)
    _check_vocabulary(described, directory, model_path)
    expected, found = tokenizer_digest(tokenizer), tokenizer_digest(load_tokenizer(str(directory)))
    if expected.vocabulary != found.vocabulary:
        raise UserError(
            f"{_SETTING}: {directory} has another tokenizer than {config.model.path}, so its "
            "values would be of other texts; choose a value model of the policy's family"
        )
    longest, needed = described.get("max_position_embeddings"), config.engine.max_model_len
    if isinstance(longest, int) and longest < needed:
        raise UserError(
            f"{_SETTING}: {directory} reads at most {longest:,} tokens, and sequences may have "
            f"{needed:,} (engine.max_model_len); lower it, or choose another value model"
        )
    critic = config.trainer.critic.model_copy(update={"model": str(directory.resolve())})
    trainer = config.trainer.model_copy(update={"critic": critic})
    return config.model_copy(update={"trainer": trainer})


def _check_vocabulary(critic: dict[str, Any], directory: Path, model_path: str) -> None:
    theirs = description_of(Path(model_path), "model.path").get("vocab_size")
    own = critic.get("vocab_size")
    if isinstance(own, int) and isinstance(theirs, int) and own < theirs:
        raise UserError(
            f"{_SETTING}: {directory} has a vocabulary of {own:,} tokens, the policy one of "
            f"{theirs:,}; the value model must know every token that the policy may draw"
        )
