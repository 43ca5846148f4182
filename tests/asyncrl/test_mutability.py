"""One table says when a setting may change, and all that ask agree with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from each_one import each_one
from pydantic import BaseModel

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.mutability import AT_A_STEP, LIVE, RULES, fixed_difference, rule_of
from asyncrl.runs.resuming import checkpoint_settings
from asyncrl.steering.safe_settings import check_is_safe
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.manifest import FORMAT, Manifest, check_settings


def keys_below(model: type[BaseModel], outer: str = "") -> Iterator[str]:
    """Every setting by its dotted path, sections left out."""
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_below(inner, f"{outer}{name}.")
        else:
            yield f"{outer}{name}"


KEYS = list(keys_below(RunConfig))


def resume_refuses(key: str) -> bool:
    """Whether a run of which this setting has changed is not continued."""
    now = RunConfig().model_dump(mode="json")
    written = checkpoint_settings(RunConfig())
    first, _, rest = key.partition(".")
    manifest = Manifest(
        format=FORMAT,
        policy_version=1,
        settings=changed(written, rest) if first == "trainer" else written,
        files={},
    )
    try:
        check_settings(Path("step-000001"), manifest, checkpoint_settings(RunConfig()))
    except CheckpointError:
        return True
    return fixed_difference(changed(now, key), now) is not None


def changed(settings: dict[str, Any], key: str) -> dict[str, Any]:
    """The settings with another value at a dotted path."""
    first, dot, rest = key.partition(".")
    inner = changed(settings[first] or {}, rest) if dot else "another value"
    return {**settings, first: inner}


def test_what_set_advises_is_what_a_resume_takes() -> None:
    with each_one() as checking:
        for key in KEYS:
            with checking(key):
                check_advice(key)


def check_advice(key: str) -> None:
    rule = rule_of(key)
    if key in LIVE:
        assert check_is_safe(key, RunConfig()) == rule.when
    else:
        with pytest.raises(UserError) as refused:
            check_is_safe(key, RunConfig())
        assert rule.reason in str(refused.value)
        if not rule.instead:
            assert ("--resume" in str(refused.value)) == (rule.when == "resume")
    of_the_device = key == "trainer.dtype"  # see `check_settings`
    assert resume_refuses(key) == (rule.when == "never" and not of_the_device)


def test_every_rule_is_of_a_setting_or_section() -> None:
    known = {
        key[:end] for key in KEYS for end in range(len(key) + 1) if key[end : end + 1] in (".", "")
    }
    assert set(RULES) <= known
    assert all(rule.reason for key, rule in RULES.items() if key not in LIVE)
    assert set(AT_A_STEP) < set(LIVE) < set(RULES)
