"""Programs that try to hurt the machine: each is contained, and what they met is reported."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from needed_programs import needs_namespaces

from asyncrl.sandbox import check
from asyncrl.sandbox.limits import MIB, Limits, SandboxError
from asyncrl.sandbox.run import Outcome, run, visible
from asyncrl.sandbox.seccomp import ARCHITECTURES, REFUSED, program

pytestmark = needs_namespaces()


def python(code: str, *, stdin: bytes = b"", **limits: float) -> Outcome:
    bounds = Limits(**({"wall_seconds": 60.0} | limits))  # type: ignore[arg-type]
    return run([sys.executable, "-I", "-S", "-c", code], stdin=stdin, limits=bounds)


def said(code: str, **limits: float) -> str:
    """What a program prints, which must end by itself and well."""
    outcome = python(code, **limits)
    assert (outcome.ending, outcome.exit_code) == ("exit", 0), outcome
    return outcome.text.strip()


def test_a_program_reads_and_writes_and_its_end_is_told() -> None:
    outcome = python("import sys; print(sys.stdin.read()[::-1]); sys.exit(3)", stdin=b"x" * 200_000)
    assert (outcome.ending, outcome.exit_code) == ("exit", 3)
    assert outcome.text == "x" * 200_000 + "\n"
    assert said("import threading as t; x = t.Thread(target=print, args=(7,)); x.start()") == "7"
    assert said("import subprocess as s; print(s.check_output(['/bin/echo', 'a']).decode())") == "a"
    crashed = python("import ctypes; ctypes.string_at(0)")
    assert (crashed.ending, crashed.exit_code) == ("signal", 128 + signal.SIGSEGV)
    with pytest.raises(SandboxError, match="No such file"):
        run(["/usr/bin/there-is-none"])


FORKS = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError:
    print(n, flush=True)
    os._exit(0)
"""


FILLS = """
import os, time
for _ in range(2): os.fork()
block = bytearray(50 << 20)
block[::4096] = b"1" * len(block[::4096])
time.sleep(600)
"""
FILLS_WITHOUT_ITS_FIRST_THREAD = """
import ctypes, os, threading, time
def fill():
    block = bytearray(50 << 20)
    block[::4096] = b"1" * len(block[::4096])
    time.sleep(600)
for _ in range(2): os.fork()
threading.Thread(target=fill).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
FILLS_SOCKETS = """
import socket, time
held = []
for _ in range(450):
    kept, gone = socket.socketpair()
    gone.setblocking(False)
    try:
        while True: gone.send(b"x" * 65536)
    except BlockingIOError: pass
    held.append(kept)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("code", "limits", "ending"),
    [
        ("import time; time.sleep(600)", {"wall_seconds": 1.0}, "wall_seconds"),
        ("while True: pass", {"cpu_seconds": 1}, "cpu_seconds"),
        ("while True: print('x' * 1000)", {}, "output_bytes"),
        (
            "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
            {"wall_seconds": 1.0},
            "wall_seconds",
        ),
        (FILLS, {"memory_bytes": 128 * MIB}, "memory_bytes"),
        (FILLS_WITHOUT_ITS_FIRST_THREAD, {"memory_bytes": 128 * MIB}, "memory_bytes"),
        (FILLS_SOCKETS, {"memory_bytes": 128 * MIB, "open_files": 1024}, "memory_bytes"),
    ],
    ids=[
        *("sleeps", "computes", "prints", "forks"),
        *("fills memory in children", "in a thread that is left", "fills sockets"),
    ],
)
def test_a_program_that_does_not_end_is_ended(
    code: str, limits: dict[str, float], ending: str
) -> None:
    outcome = python(code, **limits)
    assert outcome.ending == ending
    assert len(outcome.stdout) <= Limits().output_bytes


def test_processes_memory_disk_and_files_are_bounded() -> None:
    assert said(FORKS, processes=8) == "7"
    assert said(f"try: bytearray(600 * {MIB})\nexcept MemoryError: print('none')") == "none"
    for size, most in ((2**16, 16 * MIB // 2**16), (0, 1040)):
        written = said(
            f"n = 0\ntry:\n  while True:\n    open(str(n), 'wb').write(b'x' * {size}); n += 1\n"
            "except OSError: print(n)"
        )
        assert 0 < int(written) <= most
    assert said("import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE)[1])") == "64"


MEMORY = """
import ctypes, errno, fcntl, mmap, os, socket
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def what(name, call, *values):
    try: result = call(*values)
    except OSError as error: result = errno.errorcode[error.errno]
    else: result = errno.errorcode[ctypes.get_errno()] if result == -1 else "done"
    print(name, result)
what("private", mmap.mmap, -1, 4096, 0x22)
what("shared", mmap.mmap, -1, 4096, 0x21)
what("validated", mmap.mmap, -1, 4096, 0x23)
what("zero", os.open, "/dev/zero", os.O_RDWR)
what("memfd", os.memfd_create, "x")
what("shmget", libc.shmget, 0, 4096, 0o1600)
what("msgget", libc.msgget, 0, 0o1600)
what("mq", libc.syscall, 240 if X86 else 180, b"x", 0o102, 0o600, 0)
what("inotify", libc.inotify_init1, 0)
pipe = os.pipe()
what("vmsplice", libc.vmsplice, pipe[1], None, 0, 0)
what("pipe", fcntl.fcntl, pipe[1], 1031, 1 << 20)
what("datagrams", socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)
what("pair of another family", libc.socketpair, 30, 1, 0, (ctypes.c_int * 2)())
what("listener", socket.socket, socket.AF_UNIX)
kept, sent = socket.socketpair()
what("buffer", kept.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
what("descriptor", socket.send_fds, kept, [b"x"], [0])
"""
REFUSED_MEMORY = {
    "private": "done",
    **dict.fromkeys(("shared", "validated", "memfd", "shmget", "msgget", "mq"), "EPERM"),
    "zero": "ENOENT",
    **dict.fromkeys(("inotify", "vmsplice", "pipe", "buffer", "descriptor"), "EPERM"),
    **dict.fromkeys(("datagrams", "pair of another family", "listener"), "EAFNOSUPPORT"),
}


def test_memory_that_no_limit_counts_is_refused() -> None:
    """Shared pages outlive their mappings, and what lies in a socket or a pipe is nobody's."""
    lines = said(MEMORY).splitlines()
    assert dict(line.rsplit(" ", 1) for line in lines) == REFUSED_MEMORY


TRY = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def what(name, call, *values):
    try: result = call(*values)
    except OSError as error: print(name, errno.errorcode[error.errno])
    else: print(name, result if result != -1 else errno.errorcode[ctypes.get_errno()])
what("kill -1", os.kill, 1, 9)
what("init", os.getppid)
what("inet", socket.socket)
what("vsock", socket.socket, 40, 1)
what("netlink", socket.socket, 16, 3)
what("unshare", libc.unshare, 0x10000000)
what("mount", libc.mount, b"x", b"/tmp", b"tmpfs", 0, b"")
what("ptrace", libc.ptrace, 16, 1, 0, 0)
what("chroot", os.chroot, "/tmp")
what("setuid", lambda: os.getuid() == 0)
what("usr", open, "/usr/mine", "w")
what("root", open, "/mine", "w")
what("proc", os.listdir, "/proc")
what("home", os.path.exists, HOME)
os.symlink("/etc/passwd", "link")
what("link", open, "link")
what("null", lambda: open("/dev/null", "w").write("x"))
what("environment", lambda: "SECRET" in os.environ)
"""


def test_nothing_of_the_machine_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "1")
    tries = said(TRY.replace("HOME", repr(str(tmp_path))))
    lines = dict(line.rsplit(" ", 1) for line in tries.splitlines())
    assert lines == {
        "kill -1": "None",  # the first process of a namespace cannot be killed from inside
        "init": "1",
        **dict.fromkeys(("inet", "vsock", "netlink"), "EAFNOSUPPORT"),
        **dict.fromkeys(("unshare", "mount", "ptrace", "chroot"), "EPERM"),
        "setuid": "False",
        **dict.fromkeys(("usr", "root"), "EROFS"),
        **dict.fromkeys(("proc", "link"), "ENOENT"),
        "home": "False",
        "null": "1",
        "environment": "False",
    }


OPEN = """
import os
found = []
for n in range(3, 64):
    try: found.append(os.fstat(n) and n)
    except OSError: pass
print(found)
"""


def test_descriptors_and_what_is_left_running_do_not_survive(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        assert said(OPEN) == "[]"
    started = time.monotonic()
    outcome = python("import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(600)")
    assert (outcome.ending, outcome.exit_code) == ("exit", 0)
    assert time.monotonic() - started < 60


def test_it_dies_with_the_process_that_started_it() -> None:
    sleeps = f"import time; time.sleep(1{os.getpid()})"  # no other run of the tests waits as long
    code = f"""
import sys
from asyncrl.sandbox.limits import Limits
from asyncrl.sandbox.run import run
run([sys.executable, "-c", "{sleeps}"], limits=Limits(wall_seconds=600))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as owner:
        try:
            _wait_until(lambda: _running(sleeps))
        finally:
            owner.kill()
    _wait_until(lambda: not _running(sleeps))


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _running(argument: str) -> bool:
    """Whether a process has this argument."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if argument.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


PACKAGES = (str(Path(__file__).parents[3]), *(one for one in sys.path if "site-packages" in one))
IS_CONTAINED = "from asyncrl.sandbox import check\nprint(check.why_not())\n"


def printed(command: Sequence[str | Path], packages: Sequence[str] = PACKAGES) -> list[str]:
    """Lines that a process prints which can import asyncrl."""
    done = subprocess.run(
        command,
        env={"PYTHONPATH": os.pathsep.join(packages)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done
    return done.stdout.strip().splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root may")
def test_a_user_without_rights_is_contained_as_well() -> None:
    assert _as_a_user(IS_CONTAINED) == ["None"]
    limits = "Limits(wall_seconds=60, memory_bytes=128 << 20, open_files=1024)"
    imports = (
        "import sys\nfrom asyncrl.sandbox.limits import Limits\n"
        "from asyncrl.sandbox.run import run\n"
    )
    watched_all_the_time = "sys.modules[run.__module__]._LOOK_SECONDS = 0.0\n"
    short = f"print(run(['/bin/true'], limits={limits}).ending)"
    assert _as_a_user(imports + watched_all_the_time + short) == ["exit"]
    ends = _as_a_user(
        f"{imports}"
        f"for code in {[FILLS, FILLS_WITHOUT_ITS_FIRST_THREAD, FILLS_SOCKETS]!r}:\n"
        f"  print(run([sys.executable, '-I', '-S', '-c', code], limits={limits}).ending)\n"
        f"print(run([sys.executable, '-I', '-S', '-c', {MEMORY!r}], limits={limits}).text)"
    )
    assert ends[:3] == ["memory_bytes"] * 3
    assert dict(line.rsplit(" ", 1) for line in ends[3:] if line) == REFUSED_MEMORY


def _as_a_user(code: str) -> list[str]:
    """What this prints as a user without rights, with the packages where everybody may read."""
    drop = (
        "import os; os.setgroups([]); os.setresgid(12345, 12345, 12345)\n"
        "os.setresuid(12345, 12345, 12345)\n"
    )
    places = [f"/mnt/{number}" for number in range(len(PACKAGES))]
    script = "set -e; mount -t tmpfs tmpfs /mnt; "
    for place, package in zip(places, PACKAGES, strict=True):
        script += f"mkdir {place}; mount --bind {shlex.quote(package)} {place}; "
    return printed(in_its_own_mounts(script, ["/usr/bin/python3", "-c", drop + code]), places)


def in_its_own_mounts(script: str, command: Sequence[str | Path]) -> list[str | Path]:
    """A command that mounts what `script` says, where nobody else sees it, before it begins."""
    return ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", f'{script} exec "$@"', "sh", *command]


LOOKS = """
import os, sys, sysconfig
from pathlib import Path
from asyncrl.sandbox.run import run
LOOK = '''
import json, os, sys, sysconfig
for path in (os.path.join(sys.prefix, "new"), sysconfig.get_path("stdlib") + "/new"):
    try: open(path, "w")
    except OSError as error: print(error.strerror)
for folder in ("/tmp", "/dev/shm"):
    open(folder + "/new", "w").close()
    for name in os.listdir(folder):
        if name != "new" and name in sys.prefix:
            try: os.rename(folder + "/" + name, folder + "/moved")
            except OSError as error: print(error.strerror)
print(os.path.exists(sys.argv[1]))
'''
said = run([sys.executable, "-I", "-c", LOOK, str(Path(sys.prefix).parent / "secret")])
assert said.ending == "exit" and not said.exit_code, said
refused = {*said.text.splitlines()[:-1]}
assert refused <= {"Read-only file system", "Device or resource busy"}, said
print(said.text.splitlines()[0], said.text.splitlines()[-1], sys.prefix)
"""


@pytest.mark.parametrize("behind", ["", "a link", "a link/deeper"])
@pytest.mark.parametrize("place", ["/tmp", "/var/tmp", "/home", "/dev/shm", "/mnt"])  # noqa: S108
def test_python_may_lie_anywhere(place: str, behind: str) -> None:
    """Nothing that the sandbox mounts covers it, and nothing next to it can be seen."""
    if not os.access(place, os.W_OK):
        pytest.skip(f"this user may not write to {place}")
    with (
        tempfile.TemporaryDirectory(dir=place, prefix="a käfer ") as folder,
        tempfile.TemporaryDirectory() as elsewhere,
    ):
        (Path(folder) / "a link").symlink_to(elsewhere)
        home = Path(folder, behind)
        home.mkdir(exist_ok=True)
        venv.create(home / "own", symlinks=True)
        (home / "secret").touch()
        assert printed([home / "own/bin/python", "-c", IS_CONTAINED + LOOKS]) == [
            *("None", f"Read-only file system False {home}/own")
        ]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts, which only root may")
@pytest.mark.parametrize("place", ["/tmp", "/home", "/dev/shm"])  # noqa: S108
def test_the_interpreter_itself_may_lie_anywhere(place: str) -> None:
    """Also on a bind mount, with a link between the environment and it."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        base, link, own = (Path(folder, name) for name in ("base", "link", "own"))
        base.mkdir()
        link.symlink_to("base")
        script = (
            f"mount --bind {shlex.quote(sys.base_prefix)} {base} && "
            f"{link}/bin/python3 -m venv --without-pip {own} &&"
        )
        command = in_its_own_mounts(script, [own / "bin/python", "-c", IS_CONTAINED + LOOKS])
        assert printed(command) == ["None", f"Read-only file system False {own}"]


def test_links_on_the_way_are_shown_and_folders_once() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        top = os.path.realpath(made)
        Path(top, "real/inner").mkdir(parents=True)
        Path(top, "relative").symlink_to("real/../real")
        Path(top, "absolute").symlink_to(f"{top}/relative")
        assert visible([f"{top}/{name}" for name in ("absolute/inner", "real/inner", "none")]) == (
            [f"{top}/real/inner"],
            {f"{top}/absolute": f"{top}/relative", f"{top}/relative": "real/../real"},
        )
        assert visible([f"{top}/relative", top]) == ([top], {})
    for covered in ("/", "/dev", "/tmp"):  # noqa: S108
        with pytest.raises(SandboxError, match=rf"^{covered} cannot be shown"):
            visible([covered])


def test_where_the_kernel_refuses_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.sandbox.run._ENTER", Path(__file__).with_name("refuses.py"))
    with pytest.raises(SandboxError, match="unshare"):
        run([sys.executable, "-c", "1"])
    check.why_not.cache_clear()
    assert re.search("does not allow.*unshare -Ur", check.why_not() or "")
    check.why_not.cache_clear()


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_of_system_calls_are_those_of_the_kernels_headers(machine: str) -> None:
    file = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}[
        machine
    ]
    header = Path("/usr/include") / file
    if not header.exists():
        pytest.skip(f"there is no {header}")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    assert {
        name: str(number) for name, number in REFUSED[machine].items()
    }.items() <= numbers.items()
    assert len(program(machine)) % 8 == 0
