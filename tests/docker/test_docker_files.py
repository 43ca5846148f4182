"""Checks of the image that need no Docker. docs/install.md describes how to build and run it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")


def instructions(text: str) -> list[tuple[str, str]]:
    """Every instruction with its arguments, without comments, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name.upper(), rest.strip())
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


INSTRUCTIONS = instructions(DOCKERFILE)
STAGES = [number for number, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM"]


def copied(part: list[tuple[str, str]]) -> list[str]:
    """Paths of the repository that COPY names, except those from another stage."""
    calls = [shlex.split(rest) for name, rest in part if name in {"COPY", "ADD"}]
    return [
        source
        for words in calls
        if not any(word.startswith("--from") for word in words)
        for source in [word for word in words if not word.startswith("--")][:-1]
    ]


def last(name: str) -> str:
    """The arguments of the last such instruction of the final stage, which is the one in effect."""
    return [rest for each, rest in INSTRUCTIONS[STAGES[-1] :] if each == name][-1]


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_copied_path_exists() -> None:
    missing = [path for path in copied(INSTRUCTIONS) if not (ROOT / path).exists()]
    assert not missing


def test_the_wheel_is_built_from_every_package(project: dict[str, dict]) -> None:
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    described = [project["project"]["readme"], *project["project"]["license-files"]]
    before_build = INSTRUCTIONS[
        : next(i for i, (_, r) in enumerate(INSTRUCTIONS) if "pip wheel" in r)
    ]
    assert {*wheel, *described, "pyproject.toml"} <= set(copied(before_build))


def test_the_build_context_holds_only_what_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied(INSTRUCTIONS))


def test_layers_of_torch_and_dependencies_are_reused_when_code_changes() -> None:
    first_code = next(
        i
        for i, (name, rest) in enumerate(INSTRUCTIONS)
        if (name, rest) == ("COPY", "asyncrl asyncrl")
    )
    commands = [rest for name, rest in INSTRUCTIONS[:first_code] if name == "RUN"]
    torch, requirements = (
        next(i for i, command in enumerate(commands) if text in command)
        for text in ("pip install torch==", "pip install --requirement")
    )
    assert torch < requirements


def test_torch_has_the_version_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"torch==([\d.]+)", DOCKERFILE)) == set(
        re.findall(r"torch==([\d.]+)", makefile)
    )


def test_the_user_is_not_root_and_known_by_number() -> None:
    # Kubernetes' runAsNonRoot refuses a user that is given by name.
    assert int(last("USER")) > 0
    assert f"--uid {last('USER')}" in DOCKERFILE


def test_folders_written_at_run_time_are_volumes() -> None:
    volumes = json.loads(last("VOLUME"))
    settings = dict(re.findall(r"(\w+)=(\S+)", last("ENV")))
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        assert any(Path(settings[name]).is_relative_to(volume) for volume in volumes), name
    assert f"{last('WORKDIR')}/runs" in volumes


def test_it_runs_the_example_by_default(project: dict[str, dict]) -> None:
    (program,) = json.loads(last("ENTRYPOINT"))
    assert program in project["project"]["scripts"]
    command, config = json.loads(last("CMD"))
    assert command == "run"
    assert config.split("/")[0] in copied(INSTRUCTIONS[STAGES[-1] :])
    assert yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))["run"]


def test_no_frontend_is_fetched_to_read_the_file() -> None:
    # A frontend named by `# syntax=` comes from a registry that not every builder can reach.
    assert not re.search(r"^#\s*syntax\s*=", DOCKERFILE, re.IGNORECASE | re.MULTILINE)


def test_no_secret_is_part_of_a_layer() -> None:
    kept = [rest for name, rest in INSTRUCTIONS if name in {"ARG", "ENV", "COPY", "ADD"}]
    assert not [
        rest for rest in kept if re.search(r"(?i)token|passw|secret|\.env\b|pip\.conf", rest)
    ]
