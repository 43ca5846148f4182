"""Tests, by trying, whether this machine can contain a program."""

import functools
import sys

from asyncrl.sandbox.limits import Limits, SandboxError
from asyncrl.sandbox.run import run

_PROBE = """
import os, socket, sys
found = []
if os.getuid() == 0: found.append("it is root")
if os.getpid() > 9: found.append("it sees the machine's processes")
if os.path.exists("/proc"): found.append("it sees /proc")
try:
    open("/usr/asyncrl", "w")
    found.append("it may write to /usr")
except OSError: pass
try:
    socket.socket()
    found.append("it may open a socket")
except OSError: pass
try:
    os.kill(1, 9)
    os.fork()
except OSError: pass
sys.exit("; ".join(found) or 0)
"""
_HELP = (
    "Programs of a model run only where the kernel can contain them: Linux 5.12 or later that lets "
    "this user make namespaces (`unshare -Ur true` must work). In a container, start it with a "
    "seccomp profile that allows unshare and mount (`docker run --security-opt seccomp=FILE`, on "
    "Ubuntu also `docker run --security-opt apparmor=unconfined`), or run the generators outside "
    "of one."
)


@functools.cache
def why_not() -> str | None:
    """Say why this machine cannot contain a program, and what would help; None if it can."""
    try:
        outcome = run([sys.executable, "-I", "-S", "-c", _PROBE], limits=Limits(wall_seconds=30.0))
    except SandboxError as error:
        return f"the kernel does not allow what the sandbox needs: {error}. {_HELP}"
    if outcome.ending != "exit" or outcome.exit_code:
        said = outcome.stderr.decode(errors="replace").strip()[-400:]
        return f"a program in the sandbox is not contained: {said or outcome.ending}. {_HELP}"
    return None
