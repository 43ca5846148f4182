"""A value model that does not fit the policy is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.errors import UserError
from asyncrl.startup import model_check
from asyncrl.startup.loading_trial import Loaded
from asyncrl.startup.model_checks import with_critic
from asyncrl.tasks.model import builtin_tokenizer


@pytest.fixture(autouse=True)
def _loadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders here have no weights; `test_model_check` is about those."""
    monkeypatch.setattr(model_check, "tried", lambda _: Loaded())


def _model(folder: Path, tokenizer: Any, **described: Any) -> Path:
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 64, "max_position_embeddings": 2048, **described})
    )
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def _config(critic: Path | str | None) -> RunConfig:
    trainer: dict[str, Any] = {"algorithm": "ppo"}
    if critic is not None:
        trainer["critic"] = {"model": str(critic)}
    return parse_config({"trainer": trainer}, source="test")


def _another_tokenizer() -> Any:
    tokenizer = builtin_tokenizer()
    tokenizer.add_tokens(["another"])
    return tokenizer


def test_a_critic_of_the_policys_family_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = builtin_tokenizer()
    policy = _model(tmp_path / "policy", tokenizer)
    _model(tmp_path / "critic", tokenizer, vocab_size=96)  # more tokens do no harm
    monkeypatch.chdir(tmp_path)
    found = with_critic(_config("critic"), str(policy), tokenizer)
    assert found.trainer.critic.model == str((tmp_path / "critic").resolve())
    plain = _config(None)
    assert with_critic(plain, str(policy), tokenizer) is plain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none", "there is no directory"),
        (lambda folder: folder, "config.json is missing"),
        (
            lambda folder: _model(folder / "critic", builtin_tokenizer(), vocab_size=63),
            "a vocabulary of 63 tokens, the policy one of 64",
        ),
        (lambda folder: _model(folder / "critic", _another_tokenizer()), "another tokenizer"),
        (
            lambda folder: _model(
                folder / "critic", builtin_tokenizer(), max_position_embeddings=16
            ),
            "reads at most 16 tokens",
        ),
    ],
)
def test_a_critic_that_does_not_fit_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    tokenizer = builtin_tokenizer()
    policy = _model(tmp_path / "policy", tokenizer)
    with pytest.raises(UserError, match=message) as refused:
        with_critic(_config(make(tmp_path)), str(policy), tokenizer)
    assert "trainer.critic.model" in str(refused.value)
    assert refused.value.exit_code == 2


def test_minibatches_divide_the_step() -> None:
    with pytest.raises(UserError, match=r"must be one of 1, 2, 3, 4, 6, 12"):
        parse_config(
            {"trainer": {"minibatches": 5}, "scheduler": {"groups_per_step": 12}}, source="test"
        )
