"""What messages advise can be followed: settings, their values, commands and options exist."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from asyncrl.cli.app import app
from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.steering.control_socket import ask
from asyncrl.suggestions import command_for, resume_command
from asyncrl.wire.messages import control

ROOT = Path(__file__).parents[2]
PACKAGES = ("asyncrl", "engine", "trainer", "scheduler", "cache", "monitoring", "wire", "rollout")
SETTING = re.compile(
    rf"\b({'|'.join(RunConfig.model_fields)})((?:\.[a-z_]+)+)(?:[:=] ?([a-z0-9_]+))?"
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]++(?!\.)")
OF_OTHERS = re.compile(r"`(ray|docker|pip) [^`]*`|^usage: python -m .*")
"""A command of another tool, or how a module is run: options that `asyncrl` does not have."""
NOT_SETTINGS = {
    "run.yaml",
    "sft.yaml",
    "rewards.py",
    "trainer.log",
    "rewards.md",
    "model.save_pretrained",
    "model.resize_token_embeddings",
}
"""Four files, a page, and two methods of transformers."""


@functools.cache
def messages() -> list[tuple[str, str]]:
    """Every text of the packages that a user may read: place, and text with {} for values."""
    return list(_messages())


def _messages() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for line, text in _texts(ast.parse(file.read_text(encoding="utf-8"))):
                if " " in text:
                    yield f"{file.relative_to(ROOT)}:{line}", text


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and strings of a module but its docstrings; formatted values are {}."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield node.lineno, node.value
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            left += ast.iter_child_nodes(node)


def refused(section: str, rest: str, value: str | None) -> str | None:
    """Why this setting, or this value of it, cannot be meant; None if it can."""
    model: type[BaseModel] | None = RunConfig
    annotation: object = None
    for name in f"{section}{rest}".split("."):
        if typing.get_origin(annotation) is dict:
            return None  # its keys are the user's, as in environment.args
        field = None if model is None else model.model_fields.get(name)
        if field is None:
            return f"there is no setting {section}{rest}"
        annotation = field.annotation
        is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation if is_model else None
    choices = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
    if value and choices and value not in choices:
        return f"{section}{rest} cannot be {value}"
    return None


def test_messages_name_settings_and_values_that_exist() -> None:
    wrong, found = [], 0
    for place, text in messages():
        for match in SETTING.finditer(text):
            section, rest, value = match.groups()
            module = ROOT / f"{section}{rest}".replace(".", "/")
            if module.exists() or module.with_suffix(".py").exists():
                continue
            found += 1
            problem = refused(section, rest, value)
            is_known = f"{section}{rest}" in NOT_SETTINGS or is_code(section, rest)
            if problem is not None and not is_known:
                wrong.append(f"{place}: {problem}")
    assert found > 60
    assert not wrong, "\n".join(wrong)


def is_code(section: str, rest: str) -> bool:
    """Whether this is a name in a module, as in `asyncrl.engine.torch.engine.TorchEngine`."""
    module = ROOT / f"{section}{rest}".rpartition(".")[0].replace(".", "/")
    return module.with_suffix(".py").exists()


def test_messages_name_options_and_commands_that_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {option for command in commands.values() for p in command.params for option in p.opts}
    wrong = []
    for place, text in messages():
        if not place.startswith(("asyncrl/", "trainer/", "monitoring/")):
            continue
        named = OPTION.findall(OF_OTHERS.sub("", text))
        wrong += [f"{place}: {option}" for option in named if option not in options]
        for command in re.findall(r"`asyncrl ([a-z-]+)", text):
            if command not in commands:
                wrong.append(f"{place}: asyncrl {command}")
    assert not wrong, "\n".join(wrong)


def test_commands_repeat_what_the_user_gave(tmp_path: Path) -> None:
    run = tmp_path / "all runs" / "mine"
    assert command_for("stop", Path("runs/mine")) == "asyncrl stop mine"
    words = shlex.split(command_for("stop", run))
    assert words == ["asyncrl", "stop", "mine", "--runs", str(run.parent)]
    words = shlex.split(resume_command(run, Path("a b.yaml"), ["run.name=mine", "task.digits=[2]"]))
    assert words[:3] == ["asyncrl", "run", "a b.yaml"]
    assert words[3:] == ["--set", "run.name=mine", "--set", "task.digits=[2]", "--resume"]
    run.mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        ask(run, control.StopRequest())
    assert f"`asyncrl run '{run}/config.yaml' --resume`" in str(caught.value)
    assert f"`asyncrl report mine --runs '{run.parent}'`" in str(caught.value)
