"""What this machine or a reward cannot satisfy is refused before any process of the run starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.config import load_config
from asyncrl.errors import RewardError, UserError
from asyncrl.rewards.config import RewardConfig
from asyncrl.run.preflight import check_machine, check_rewards

CORES = os.cpu_count() or 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"launcher.threads={CORES + 1}", f"^launcher.threads: {CORES + 1} is more than the"),
        (f"engine.threads={CORES + 1}", "^engine.threads: "),
        (f"trainer.threads={CORES + 1}", "^trainer.threads: "),
        (
            "engine={kind: sglang, sglang: {python: /no/python}}",
            "^engine.sglang.python: /no/python does not exist.*setup-sglang",
        ),
        (
            f"launcher={{pin_cores: true, generators: {CORES}}}",
            rf"^launcher.pin_cores: {CORES} generator\(s\) and a trainer .* need {CORES + 1} cores",
        ),
    ],
)
def test_a_machine_that_is_too_small(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_machine(load_config(None, [override]))
    check_machine(load_config(None, []))


def test_what_a_compiler_is_needed_for_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_config(None, ["trainer.compile=true"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^trainer.compile: true needs a C\+\+ compiler.*apt-get"):
        check_machine(config)
    (tmp_path / "c++").touch(mode=0o755)
    check_machine(config)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"name": "exact_mach"}, "Did you mean 'exact_match'"),
        ({"name": "format"}, "'format' cannot be called as .*missing a required.*'pattern'"),
        ({"name": "exact_match", "args": {"case": 1}}, "unexpected keyword argument 'case'"),
        ({"name": "no_such_module_here:f"}, "there is no module 'no_such_module_here'"),
        ({"name": "FILE:nothing"}, "has no 'nothing'. Did you mean"),
        ({"name": "FILE:two"}, "cannot be called as function"),
        ({"name": "FILE:three", "args": {"scale": 2}}, "unexpected keyword argument 'scale'"),
        ({"name": "BROKEN:f"}, r"(?s)loading the rewards .*ZeroDivisionError"),
    ],
)
def test_a_reward_that_cannot_be_called(
    tmp_path: Path, function: dict[str, object], message: str
) -> None:
    mine, broken = tmp_path / "mine.py", tmp_path / "broken.py"
    mine.write_text(
        "def two(prompt, response): ...\ndef three(prompt, response, example): return 1\n"
        "def anything(prompt, response, example): return 1\n"
    )
    broken.write_text("1 / 0\n")
    name = str(function["name"]).replace("FILE", str(mine)).replace("BROKEN", str(broken))
    config = RewardConfig.model_validate({"functions": [function | {"name": name}]})
    with pytest.raises(RewardError, match=message):
        check_rewards(config)
    check_rewards(RewardConfig.model_validate({"functions": [{"name": f"{mine}:three"}]}))
    check_rewards(RewardConfig())
