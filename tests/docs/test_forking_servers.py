"""Processes of one session of tests share the servers that fork for them; these end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forking_server
import pytest

SECONDS = 120.0
SUPPORT = Path(forking_server.__file__).parent
SERVER = """
import os, socket, sys
from forking_server import serve

def become(request, files):
    os._exit(int(request))

serve(socket.socket(fileno=int(sys.argv[1])), become)
"""
WORKER = f"""
import os, sys
from forking_server import Forked, shared
address, server = shared("test", [sys.executable, "-c", {SERVER!r}], os.environ)
status = Forked(address, sys.argv[1].encode(), []).status()
print(server, os.waitstatus_to_exitcode(status))
"""
SESSION = f"""
import os, signal, subprocess, sys
from forking_server import FOLDER, begin_session
end = begin_session()
print(os.environ[FOLDER], flush=True)
workers = [
    subprocess.Popen([sys.executable, "-c", {WORKER!r}, code], stdout=subprocess.PIPE, text=True)
    for code in "345"
]
print(*(worker.communicate()[0].strip() for worker in workers), flush=True)
sys.stdin.readline()
end()
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("ends", ["ends", "is killed"])
def test_three_workers_share_a_server_that_ends_with_their_session(ends: str) -> None:
    others = {name: one for name, one in os.environ.items() if name != forking_server.FOLDER}
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION],
        env=others | {"PYTHONPATH": str(SUPPORT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert session.stdin is not None
    assert session.stdout is not None
    with session:
        folder = Path(session.stdout.readline().strip())
        said = session.stdout.readline().split()
        (server,) = {*map(int, said[::2])}
        assert said[1::2] == ["3", "4", "5"], "each had a process that it asked for"
        assert is_alive(server), "the workers have ended, and the session has not"
        if ends == "ends":
            session.stdin.write("\n")
            session.stdin.flush()
            assert session.stdout.readline() == "ended\n"
        else:
            os.kill(session.pid, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while is_alive(server) or folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """False also for a process that nobody has waited for."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
