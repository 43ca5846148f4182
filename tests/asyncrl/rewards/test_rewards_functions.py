"""The rewards that come by name, and how a name becomes a function."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from asyncrl.errors import RewardError
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.functions import (
    arithmetic,
    check_name,
    exact_match,
    load_function,
    math_verify,
    response_format,
)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("8+5+0=13:13", 1.0),
        ("8+5+0=13:13<end>", 1.0),
        ("8+5+0=13:13 ", 1.0),
        ("8+5+0=13:12", 0.0),
        ("8+5+0=13:13:", 0.0),
        ("13", 0.0),
        ("", 0.0),
        (":13:14", 0.0),
    ],
)
def test_arithmetic(response: str, value: float) -> None:
    assert arithmetic("8+5=?", response, {"answer": "13"}) == value


def test_exact_match_and_format() -> None:
    assert exact_match("", " Paris\n", {"answer": "Paris"}) == 1.0
    assert exact_match("", "paris", {"answer": "Paris"}) == 0.0
    assert exact_match("", "Paris, France", {"answer": "Paris"}) == 0.0
    assert exact_match("", "In Paris", {"answer": "Paris"}) == 0.0
    assert exact_match("", "paris", {"answer": "Paris"}, ignore_case=True) == 1.0
    with pytest.raises(ValueError, match=r"set task\.answer_field"):
        exact_match("", "x", {"answer": None})
    assert response_format("", "<a>\n1</a>", {}, pattern="<a>.*</a>") == 1.0
    assert response_format("", "x<a></a>", {}, pattern="<a>.*</a>") == 0.0


def test_math_verify() -> None:
    example = {"answer": r"\frac{1}{2}"}
    assert math_verify("", r"so it is $\boxed{0.5}$", example) == 1.0
    assert math_verify("", r"so it is $\boxed{0.25}$", example) == 0.0
    assert math_verify("", "no idea", example) == 0.0


def test_names_are_checked() -> None:
    def refused(name: str) -> str:
        with pytest.raises(RewardError) as caught:
            check_name(name)
        return str(caught.value)

    assert "Did you mean 'exact_match'?" in refused("exactmatch")
    assert "must be written" in refused("module:")
    assert "must be written" in refused(":function")
    assert "there is no file nowhere/r.py (looked from " in (said := refused("nowhere/r.py:f"))
    assert "from the folder of the configuration file)" in said
    assert "neither a module's name" in refused("my-module:f")
    check_name("my.module:f")


def test_user_functions_are_loaded_and_their_signature_checked(tmp_path: Path) -> None:
    source = tmp_path / "r.py"
    source.write_text(
        "def good(prompt, response, example, *, bonus=0.0):\n    return 1.0 + bonus\n"
        "def short(prompt):\n    return 1.0\nvalue = 3\n"
    )
    assert load_function(f"{source}:good", {"bonus": 1.0})("", "", {}, bonus=1.0) == 2.0
    with pytest.raises(RewardError, match="Did you mean 'good'"):
        load_function(f"{source}:goood", {})
    with pytest.raises(RewardError, match=r"args \['bonsu'\].*its signature is"):
        load_function(f"{source}:good", {"bonsu": 1.0})
    with pytest.raises(RewardError, match="cannot be called as function"):
        load_function(f"{source}:short", {})
    with pytest.raises(RewardError, match="it is of type int"):
        load_function(f"{source}:value", {})
    with pytest.raises(RewardError, match="no module 'nowhere_at_all'"):
        load_function("nowhere_at_all:f", {})


def test_a_module_that_ends_the_process_at_its_import_says_so(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import argparse\nargparse.ArgumentParser().parse_args(['--no-such'])\n")
    with pytest.raises(RewardError, match=r"(?s)line 2.*SystemExit: 2\n.*__main__"):
        load_function(f"{file}:score", {})


def test_a_module_that_misses_another_shows_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_reward.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_function("needy_reward:f", {})


def test_the_worker_imports_nothing_heavy() -> None:
    code = (
        "import sys, asyncrl.rewards.worker; "
        "print(sorted({'torch', 'pydantic', 'numpy', 'transformers', 'zmq'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "values",
    [
        {"workers": 0},
        {"timeout_seconds": 0},
        {"functions": [{"name": "arithmetic", "weight": float("nan")}]},
        {"function": []},
    ],
)
def test_config_refuses(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RewardConfig.model_validate(values)
