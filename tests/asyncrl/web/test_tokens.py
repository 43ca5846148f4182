"""The file of the token."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.run_config import load_config
from asyncrl.errors import ConfigError, UserError
from asyncrl.web import command
from asyncrl.web.command import show_page
from asyncrl.web.serving import read_token, token_path, write_token


def test_a_new_token_is_for_this_user_only(tmp_path: Path) -> None:
    path = token_path(tmp_path, None)
    path.write_text("an older token of anybody")
    path.chmod(0o644)
    write_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    first = read_token(path)
    assert len(first) >= 40
    write_token(path)
    assert read_token(path) != first


def test_a_link_in_the_place_of_the_token_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    token_path(tmp_path, None).symlink_to(other)
    write_token(token_path(tmp_path, None))
    assert other.read_text() == "precious"


@pytest.mark.parametrize(
    "contents", [b"", b"short", b"has several words in it", b"\xff" * 40, b"x" * 5000]
)
def test_what_is_no_token_is_refused(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(contents)
    path.chmod(0o600)
    with pytest.raises(UserError, match="does not hold a token"):
        read_token(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing-here cannot be read: No such file"):
        read_token(tmp_path / "nothing-here")


@pytest.mark.parametrize("host", ["192.168.0.7", "::", "10.0.0.5", "my-machine"])
def test_another_address_without_a_token_is_no_configuration(host: str) -> None:
    with pytest.raises(ConfigError, match=r"monitoring\.web.*token_file"):
        load_config(None, [f"monitoring.web.host='{host}'"])
    named = ["monitoring.web.token_file=/run/secrets/token", f"monitoring.web.host='{host}'"]
    assert load_config(None, named).monitoring.web.host == host
    off = ["monitoring.web.enabled=false", f"monitoring.web.host='{host}'"]
    assert not load_config(None, off).monitoring.web.enabled


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.3.2.1"])
def test_loopback_needs_none(host: str) -> None:
    assert load_config(None, [f"monitoring.web.host='{host}'"]).monitoring.web.token_file is None


def test_a_link_holds_any_token_and_a_port_is_for_ended_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text('{"pid": 1, "web": "http://127.0.0.1:5"}')
    write_token(token_path(tmp_path, None))
    (tmp_path / "web.token").write_text("100%-secret&odd#token")
    monkeypatch.setattr(command, "is_alive", lambda _run: True)
    said: list[str] = []
    show_page(tmp_path, 0, said.append)
    assert said == ["http://127.0.0.1:5/#token=100%25-secret%26odd%23token"]
    with pytest.raises(UserError, match="--port is for the page of an ended run"):
        show_page(tmp_path, 8000, said.append)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660])
def test_a_token_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("sixteen-letters-and-more")
    path.chmod(mode)
    with pytest.raises(UserError, match=rf"token_file.*has mode {mode:04o}.*chmod 600"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == "sixteen-letters-and-more"
