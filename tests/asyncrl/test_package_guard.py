from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from asyncrl.errors import UserError
from asyncrl.package_guard import OURS, refuse_foreign_packages


def test_every_package_of_the_wheel_is_guarded() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert sorted(OURS) == sorted(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def test_no_other_distribution_provides_our_packages_here() -> None:
    refuse_foreign_packages()


def test_another_provider_is_named_with_what_to_do() -> None:
    providers = {name: ["asyncrl"] for name in OURS} | {"cache": ["asyncrl", "cachelib"]}
    with pytest.raises(UserError, match=r"'cache' by cachelib.*virtual environment"):
        refuse_foreign_packages(providers)
