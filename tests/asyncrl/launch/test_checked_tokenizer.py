"""A process whose tokenizer is not that of the run's prompts says so and does not start."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from generator_harness import FakeLine

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import WrongPolicyError
from asyncrl.launch.process_startup import load_checked_tokenizer
from asyncrl.tasks.model_tokenizer import load_tokenizer, tokenizer_digest
from asyncrl.wire.messages.from_trainer import WrongPolicyFound
from asyncrl.wire.records.wrong_policy import TokenizerDigest


def load(
    path: Path, expected: TokenizerDigest | None, action: str = "stop"
) -> tuple[Any, FakeLine]:
    line = FakeLine()
    child: Any = SimpleNamespace(
        spec=SimpleNamespace(name="trainer", model_path=str(path), tokenizer=expected),
        control=line,
        config=RunConfig.model_validate({"run": {"on_wrong_policy": action}}),
    )
    try:
        return asyncio.run(load_checked_tokenizer(child, WrongPolicyFound)), line
    except WrongPolicyError as error:
        return error, line


def test_a_changed_chat_template_is_reported(own_model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((own_model / name).read_bytes())
    expected = tokenizer_digest(load_tokenizer(str(own_model)))
    tokenizer, line = load(tmp_path, expected)
    assert tokenizer("1")["input_ids"]
    assert not line.sent

    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0].content }}!"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(settings["chat_template"])
    for action in ("stop", "warn"):
        loaded, line = load(tmp_path, expected, action)
        assert isinstance(loaded, WrongPolicyError) == (action == "stop")
        (message,) = line.sent
        assert message.found.cause == "tokenizer"
        assert "trainer has another chat template than the run's prompts" in message.found.text
    assert not load(tmp_path, None)[1].sent, "nothing to compare with"


@pytest.mark.parametrize("action", ["stop", "warn"])
def test_a_run_is_resumed_with_the_tokenizer_that_it_began_with(
    own_model: Path, action: str
) -> None:
    from asyncrl.controller.execute import _tokenizer
    from asyncrl.errors import UserError

    tokenizer, found = load_tokenizer(str(own_model)), []
    config = RunConfig.model_validate({"run": {"on_wrong_policy": action}})
    prepared: Any = SimpleNamespace(
        config=config, model_path=str(own_model), task=SimpleNamespace(tokenizer=tokenizer)
    )
    state = SimpleNamespace(tokenizer=None)
    directory: Any = SimpleNamespace(state=state, path="runs/mine", write_state=lambda: None)
    progress: Any = SimpleNamespace(found=found.append)
    began_with = _tokenizer(prepared, directory, progress)
    assert state.tokenizer == began_with
    assert _tokenizer(prepared, directory, progress) == began_with
    tokenizer.chat_template = "{{ messages[0].content }}!"
    if action == "stop":
        with pytest.raises(UserError, match=r"cannot resume runs/mine: .*another chat template"):
            _tokenizer(prepared, directory, progress)
    else:
        assert _tokenizer(prepared, directory, progress) != began_with
        assert [one.cause for one in found] == ["tokenizer"]
    assert state.tokenizer == began_with
