"""How a child process gets its keys."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from fake_processes import generator_spec
from msgspec.structs import replace
from reward_pools import alive

from asyncrl.launch.child_spec import ChildKeys, keys_of
from asyncrl.launch.local import LocalLauncher
from asyncrl.launch.records import ProcessRecords
from asyncrl.wire import RunKey


def secrets_of(keys: ChildKeys) -> list[bytes]:
    """The keys themselves, raw and as text in which they could be passed."""
    found = [keys.control.hub, keys.control.identity[-16:]]
    found += [found[-1].hex().encode(), msgspec.msgpack.encode(keys)]
    return found


def _shown_by(pid: int) -> bytes:
    """Command line and environment of a child, once it is our program; empty if it has ended."""
    process = Path(f"/proc/{pid}")
    while alive(pid):
        shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        if b"asyncrl.child" in shown:
            return shown
    return b""


def test_keys_are_not_on_the_command_line_or_in_the_environment(tmp_path: Path) -> None:
    keys = keys_of(RunKey.new(), "generator-0", "generator")
    # Its parent is another process, so the child exits at once.
    spec = replace(generator_spec(), run_directory=str(tmp_path))
    launcher = LocalLauncher(tmp_path, ProcessRecords(tmp_path), generators=1, threads=1)
    for _ in range(10):  # one that ended before it was looked at shows nothing
        handle = launcher.start(spec, keys)
        pid = handle._process.pid  # type: ignore[attr-defined]
        shown = _shown_by(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if shown:
            break
    assert b"asyncrl.child" in shown
    assert not any(secret in shown for secret in secrets_of(keys))
    on_disk = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(secret in on_disk for secret in secrets_of(keys))
    handle.end(by_force=True)
    handle.exit_code()
