from __future__ import annotations

import sys
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


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("top_level.txt", "cachelib\ncache\n"),
        ("RECORD", "cachelib-1.dist-info/METADATA,,\ncache/base.py,sha256=x,9\n"),
        ("RECORD", "cache.py,sha256=x,9\n"),
    ],
)
def test_another_provider_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    installed(tmp_path, file, text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="'cache' by cachelib"):
        refuse_foreign_packages()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("top_level.txt", "cachelib\ncache_of\nof.cache\n"),
        ("RECORD", "of/cache/base.py,,\ncache-1.dist-info/a.py,,\ncaches/a.py,,\ncache/a.txt,,\n"),
    ],
)
def test_other_packages_of_similar_names_are_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    installed(tmp_path, file, text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    refuse_foreign_packages()


def installed(site: Path, file: str, text: str) -> None:
    """Put a distribution there that has this file."""
    about = site / "cachelib-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cachelib\nVersion: 1\n")
    (about / file).write_text(text)
