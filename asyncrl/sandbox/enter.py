"""The process between this machine and an untrusted program. `python -I -S enter.py ORDER ANSWER`.

    run ── starts ──► this ── forks ──► first process of new namespaces ── forks ──► program
                      waits             waits, ends with the program

    ORDER     descriptor of the order, JSON as `run` makes it
    ANSWER    descriptor of the answer: lines of JSON, {"exit_code"} or {"refused"}

The end of the first process of a process namespace ends all others in it, whatever they have done.
It dies with this process, which dies with the one that started it. Only the standard library is
imported, so that this starts in milliseconds; asyncrl cannot be seen from inside.
"""

import base64
import ctypes
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Mounts, control groups, host name, System V objects, processes, network."""
_NEW_USER = 0x10000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_ATTR_READ_ONLY, _ATTR_NO_SUID, _ATTR_NO_DEVICES = 1, 2, 4
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_AT_RECURSIVE = 0x8000
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_FILTER = 2
_FIRST_UID = 0x70000000
"""First of the unused user ids: each program gets its own one, as limits hold per user."""
_NOBODY = 65534
_INNER_UID = 1000
_WRITABLE = ("/tmp", "/dev/shm")  # noqa: S108 - inside
"""Two names of one folder in memory."""
_DEVICES = ("null", "full", "random", "urandom")
"""Device files, without /dev/zero: a shared mapping of it is memory that no limit counts."""
_MACHINE = os.uname().machine

_ANSWER = int(sys.argv[2])
_libc = ctypes.CDLL(None, use_errno=True)


class _RefusedError(Exception):
    """The kernel refused one of the steps that contain a program."""


def _call(what: str, result: int) -> None:
    if result != 0:
        raise _RefusedError(f"{what}: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, value: int, what: str) -> None:
    _call(what, _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [None if one is None else os.fsencode(one) for one in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode())
    _call(f"mounting {kind or source} at {target}", result)


def _attributes(target: str, attributes: int, *, recursive: bool) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(_MOUNT_SETATTR, -100, os.fsencode(target), flags, wanted, len(wanted))
    _call(f"making {target} read-only (mount_setattr, Linux 5.12)", result)


def main() -> None:
    """Read the order, enter the namespaces, and answer how the program ended."""
    with os.fdopen(int(sys.argv[1]), "rb") as stream:
        order = json.load(stream)
    os.set_inheritable(_ANSWER, False)
    os.umask(0o022)  # the program is another user, and must get to what is shown
    try:
        _die_with(order["parent"])
        first = _enter(order)
        _, status = os.waitpid(first, 0)
        answer: dict[str, Any] = {"exit_code": os.waitstatus_to_exitcode(status)}
    except (_RefusedError, OSError) as error:
        answer = {"refused": _reason(error)}
    _answer(answer)


def _answer(answer: dict[str, Any]) -> None:
    os.write(_ANSWER, json.dumps(answer).encode() + b"\n")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or 'a system call'}"
    return str(error)


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "the signal at the parent's death")
    if os.getppid() != parent:
        sys.exit(1)


def _enter(order: dict[str, Any]) -> int:
    """Make the namespaces and their first process; return its process id.

    Root keeps the host's user namespace and switches to an unused uid. Other users need a user
    namespace to be allowed the rest.
    """
    root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    _call("unshare (namespaces)", _libc.unshare(_NAMESPACES | (0 if root else _NEW_USER)))
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{_INNER_UID} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{_INNER_UID} {group} 1")
    alive, keep = os.pipe()
    outside = os.getpid()
    first = os.fork()
    if first:
        os.close(alive)
        return first
    try:
        os.close(keep)
        uid = _FIRST_UID + outside if root else _INNER_UID
        _make_root(order, uid)
        _become(uid, root=root)
        if select.select([alive], [], [], 0)[0]:  # the parent has died
            os._exit(1)
        _first_process(order)
    except (_RefusedError, OSError) as error:
        _answer({"refused": _reason(error)})
    os._exit(1)


def _make_root(order: dict[str, Any], uid: int) -> None:
    """Make a root folder in which the program can write /tmp only.

    It is built on a folder of the machine that does not contain anything to be shown. Everything to
    be shown is opened first, so that mounts cannot hide it.
    """
    opened = {path: os.open(path, os.O_PATH) for path in order["readable"]}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    new: str = order["mount_point"]
    _mount("tmpfs", new, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755,size=1m,nr_inodes=4096")
    for path, descriptor in opened.items():
        _show(descriptor, new + path)
    for link, target in order["links"].items():
        Path(new + link).parent.mkdir(parents=True, exist_ok=True)
        Path(new + link).symlink_to(target)
    for name, descriptor in devices.items():
        _bind(descriptor, f"{new}/dev/{name}")
    _make_writable(order, new, uid)
    os.chdir(new)
    _call("pivot_root", _libc.syscall(_PIVOT_ROOT[_MACHINE], b".", b"."))
    _call("leaving the old root", _libc.umount2(b".", _DETACH))
    os.chdir("/")
    _attributes("/", _ATTR_READ_ONLY, recursive=False)
    os.chdir("/tmp")  # noqa: S108
    _call("sethostname", _libc.sethostname(b"sandbox", 7))


def _make_writable(order: dict[str, Any], new: str, uid: int) -> None:
    """Cover /tmp and /dev/shm; required paths below them become mounts, which cannot be moved."""
    shown: dict[str, int] = {}
    for place in _WRITABLE:
        Path(new + place).mkdir(parents=True, exist_ok=True)
        for entry in Path(new + place).iterdir():
            shown[str(entry)] = os.open(entry, os.O_PATH | os.O_NOFOLLOW)
    first, *others = _WRITABLE
    inodes = order["files"] + 16 + len(shown)
    options = f"mode=700,uid={uid},gid={uid},size={order['disk_bytes']},nr_inodes={inodes}"
    _mount("tmpfs", new + first, "tmpfs", _NO_SUID | _NO_DEVICES, options)
    made = os.open(new + first, os.O_PATH)
    for place in others:
        _bind(made, new + place)
    for target, descriptor in shown.items():
        _show(descriptor, target)
    for name, text in order["contents"].items():
        path = Path(new + first, name)
        path.write_text(text, encoding="utf-8")
        os.chown(path, uid, uid)


def _show(descriptor: int, target: str) -> None:
    _bind(descriptor, target)
    _attributes(target, _ATTR_READ_ONLY | _ATTR_NO_SUID | _ATTR_NO_DEVICES, recursive=True)


def _bind(descriptor: int, target: str) -> None:
    place = Path(target)
    place.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        place.mkdir(exist_ok=True)
    else:
        place.touch()
    _mount(f"/proc/self/fd/{descriptor}", target, None, _BIND | _RECURSIVE)


def _become(uid: int, *, root: bool) -> None:
    """Drop every right that this process has or could get by starting a program."""
    if root:
        os.setgroups([])
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:  # root of a container whose users end earlier
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    else:
        header, nothing = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
        _call("giving up capabilities", _libc.capset(header, nothing))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    _prctl(_PR_SET_DUMPABLE, 0, "not being read by others")
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "the signal at the parent's death")


def _first_process(order: dict[str, Any]) -> NoReturn:
    _limit(order)
    program = os.fork()
    if program == 0:
        try:
            os.setsid()
            os.closerange(3, _ANSWER)
            os.closerange(_ANSWER + 1, 1 << 16)
            _prctl(_PR_SET_DUMPABLE, 1, "being read by the watcher")  # from the filter on
            _filter(base64.b64decode(order["filter"]))
            os.execve(order["command"][0], order["command"], order["environment"])  # noqa: S606
        except _RefusedError as error:
            _answer({"refused": str(error)})
        except OSError as error:
            _answer({"refused": f"{order['command'][0]}: {error.strerror}"})
        os._exit(1)
    os.closerange(0, 3)
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _limit(order: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: order["memory_bytes"],
        resource.RLIMIT_FSIZE: order["disk_bytes"],
        resource.RLIMIT_NOFILE: order["open_files"],
        resource.RLIMIT_NPROC: order["processes"] + 1,  # the first process
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        11: order["open_files"],  # RLIMIT_SIGPENDING
        12: 0,  # RLIMIT_MSGQUEUE
    }
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    seconds = order["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU, then SIGKILL


def _filter(program: bytes) -> None:
    lines = ctypes.create_string_buffer(program, len(program))
    order = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(lines))
    result = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_FILTER), order, 0, 0)
    _call("the filter of system calls", result)


if __name__ == "__main__":
    main()
