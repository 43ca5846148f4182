"""Runs one program in the sandbox, to its end or to a limit. Import-light.

Its time limit counts own time, so that other load of the machine does not matter:

    own time = time by the clock, less the time in which it waited for a core

The waiting time is read from /proc/PID/task/*/schedstat. If the kernel does not provide it, all
time is the program's own.

The memory of a program is measured from outside:

    private pages, swapped ones and huge ones     what /proc says of each process
    shared pages of files in its /tmp             likewise, once for each process that maps them
    pipes and socket pairs                        what each open one can hold at most

The filter of system calls refuses everything else that holds memory (`asyncrl.sandbox.seccomp`).
"""

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

import msgspec

from asyncrl.sandbox.limits import Limits, SandboxError
from asyncrl.sandbox.seccomp import ARCHITECTURES, program
from asyncrl.user_code.process_tree import descendants

_COUNTED = ("RssAnon", "RssShmem", "VmSwap", "HugetlbPages")
_BUFFERS = {"pipe": 64 << 10, "socket": 320 << 10}
"""Maximum bytes held by one: a pipe's 16 pages; a socket's send buffer of 208 KiB, which the last
message may exceed by half."""


def held(below: Sequence[int], open_files: int) -> int:
    """Return the bytes that a program holds.

    `below` are the ids of its processes, after that of the first process of its namespace.
    `open_files` bounds the descriptors of a process, and is used where they cannot be read.
    """
    buffers: dict[str, int] = {}
    total = 0
    own_filters = _filters(_status("/proc/self"))
    for pid in below:
        # Check each thread: the first one may have ended, and others may have separate descriptors.
        tasks = [f"/proc/{pid}/task/{thread}" for thread in _entries(f"/proc/{pid}/task") or []]
        seen = {task: _status(task) for task in tasks}
        total += max(map(_pages, seen.values()), default=0)
        for task, status in seen.items():
            if pid == below[0] or _filters(status) <= own_filters:
                continue  # not the program: it has the filter of system calls, to its end
            found = _buffers(f"{task}/fd")
            if found is not None:
                buffers |= found
            elif "VmSize" in _status(task):  # else it has ended
                buffers[str(pid)] = open_files * _BUFFERS["socket"]
    return total + sum(buffers.values())


def _status(task: str) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path(f"{task}/status").read_text().splitlines()
        return {name: value for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _pages(status: dict[str, str]) -> int:
    return sum(int(status[name].split()[0]) * 1024 for name in _COUNTED if name in status)


def _filters(status: dict[str, str]) -> int:
    return int(status.get("Seccomp_filters", 0))


def _buffers(folder: str) -> dict[str, int] | None:
    """Return pipes and sockets by name, with their capacity; None if access is denied."""
    names = _entries(folder)
    if names is None:
        return None
    found: dict[str, int] = {}
    for name in names:
        with contextlib.suppress(OSError):
            target = Path(folder, name).readlink().name
            kind = target.partition(":")[0]
            if kind in _BUFFERS:
                found[target] = _BUFFERS[kind]
    return found


def _entries(folder: str) -> list[str] | None:
    """Return names in a folder of /proc, empty if the process has ended; None if denied."""
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except PermissionError:
        return None
    except OSError:
        return []


Times = dict[str, tuple[float, float]]
"""Seconds that each thread has run and has waited for a core."""


@dataclass(slots=True)
class OwnTime:
    """Adds up the samples of one program's times.

    Example:
        >>> own = OwnTime()
        >>> own.note(10.0, {"7": (0.0, 0.0)})
        >>> own.note(14.0, {"7": (1.0, 2.0)})  # it has run, waited for a core, and slept
        >>> own.seconds
        2.0
    """

    _began: float | None = None
    _last: float = 0.0
    _ran: float = 0.0
    _waited: float = 0.0
    _seen: Times = field(default_factory=dict)

    def note(self, now: float, times: Times) -> None:
        """Add a sample of the threads' `times`, empty before the start and after the end."""
        if not times:
            return
        if self._began is None:
            self._began = now
        self._last = now
        before = [self._seen.get(thread, (0.0, 0.0)) for thread in times]
        pairs = list(zip(times.values(), before, strict=True))
        self._ran += sum(max(0.0, ran - earlier) for (ran, _), (earlier, _) in pairs)
        self._waited += max(max(0.0, waited - earlier) for (_, waited), (_, earlier) in pairs)
        self._seen = dict(times)

    @property
    def seconds(self) -> float:
        """Own time. Threads that wait for each other's cores do not delay other programs."""
        elapsed = 0.0 if self._began is None else self._last - self._began
        return max(elapsed - self._waited, min(elapsed, self._ran))


def times_of(processes: Iterable[int]) -> Times:
    """Return the times of all threads of these processes."""
    times: Times = {}
    for pid in processes:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    ran, waited = (thread / "schedstat").read_text().split()[:2]
                    times[thread.name] = (int(ran) / 1e9, int(waited) / 1e9)
    return times or dict.fromkeys(map(str, processes), (0.0, 0.0))


Ending = Literal["exit", "signal", "wall_seconds", "cpu_seconds", "memory_bytes", "output_bytes"]
"""`exit`: it exited. `signal`: a signal killed it, by its own fault. Others: the limit reached."""

_ENTER = Path(__file__).with_name("enter.py")
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_SYSTEM = ("/usr", "/bin", "/sbin", *_LIBRARIES)
_OWN = ("/tmp", "/dev/shm")  # noqa: S108 - inside
"""Separate folders of the sandbox. Paths to be shown may lie below them."""
_MOUNT_POINTS = ("/tmp", "/mnt", "/var/tmp", "/srv", "/home", "/dev")  # noqa: S108
"""Folders of the machine; the sandbox is built on one without anything to be shown."""
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",  # noqa: S108 - inside
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_LOOK_SECONDS = 0.02
_END_SECONDS = 10.0
_CHUNK = 1 << 16
_SIGNALS = 128


@dataclass(slots=True)
class Outcome:
    """The end of a program."""

    ending: Ending = "exit"
    exit_code: int = 0
    """Exit code as in a shell: above 128, the signal that killed it."""
    stdout: bytes = b""
    stderr: bytes = b""
    own_seconds: float = 0.0
    """Time in which it did not wait for a core, without the start of the sandbox; see `OwnTime`."""

    @property
    def text(self) -> str:
        """Standard output as text; invalid UTF-8 is replaced."""
        return self.stdout.decode(errors="replace")


def run(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    contents: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    readable: Sequence[str | Path] = (),
) -> Outcome:
    """Run `command` with all that it starts, until every process of it has ended.

    The command begins with an absolute path below a system folder, Python's own or `readable` (more
    folders that it may read). It reads `stdin` and may change the files of its working folder
    (/tmp), which are `contents`, name to text. Raises SandboxError if this machine cannot contain
    it; it has not run then.
    """
    limits = limits or Limits()
    order = _order(command, contents or {}, limits, readable)
    order_read, order_write = os.pipe()
    answer_read, answer_write = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_ENTER), str(order_read), str(answer_write)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            pass_fds=(order_read, answer_write), env=_ENVIRONMENT,
        )  # fmt: skip
    except OSError as error:
        for descriptor in (order_write, answer_read):
            os.close(descriptor)
        raise SandboxError(f"the sandbox cannot start {sys.executable}: {error}") from error
    finally:
        os.close(order_read)
        os.close(answer_write)
    with (
        child,
        os.fdopen(order_write, "wb", buffering=0) as orders,
        os.fdopen(answer_read, "rb") as answers,
    ):
        watch = _Watch(child, limits, answers, stdin)
        try:
            with contextlib.suppress(BrokenPipeError):
                orders.write(order)
            orders.close()
            return watch.to_the_end()
        finally:
            watch.kill()


def _order(
    command: Sequence[str], contents: Mapping[str, str], limits: Limits, readable: Sequence[Any]
) -> bytes:
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise SandboxError(
            f"programs can be contained on Linux on {' and '.join(ARCHITECTURES)} only, "
            f"not on {sys.platform} {machine}"
        )
    own = (sys.prefix, sys.base_prefix, sys.executable)
    folders, links = visible([*_SYSTEM, *own, *map(str, readable)])
    order: dict[str, Any] = {
        "parent": os.getpid(),
        "command": list(command),
        "environment": _ENVIRONMENT,
        "contents": {k: text.encode(errors="replace").decode() for k, text in contents.items()},
        "readable": folders,
        "links": links,
        "mount_point": _mount_point(folders),
        "filter": base64.b64encode(program(machine)).decode(),
    }
    return json.dumps(order | msgspec.structs.asdict(limits)).encode()


def visible(paths: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return disjoint files and folders to show, and links such as /bin -> usr/bin.

    Links anywhere on the way are shown as such. Only /tmp and /dev/shm, and names directly in them,
    are folders in the sandbox, so the target of a link there is shown under the link's name. Raises
    SandboxError if one of `paths` contains a separate folder of the sandbox.
    """
    links: dict[str, str] = {}
    ends = {_followed(path, links) for path in paths if Path(path).exists()}
    folders: list[str] = []
    for path in sorted(ends):
        if any(_holds(path, own) for own in _OWN):
            raise SandboxError(f"{path} cannot be shown: the sandbox has a separate {_OWN[0]}")
        if not _inside(folders, path):
            folders.append(path)
    return folders, {link: links[link] for link in links if not _inside(folders, link)}


def _followed(path: str, links: dict[str, str]) -> str:
    """Return the target of a path; add the links on the way to `links`."""
    place, names = "/", list(reversed(Path(path).absolute().parts))
    while names:
        name = names.pop()
        before, place = place, os.path.normpath(Path(place, name))
        ours = place in _OWN or before in _OWN
        if name != ".." and not ours and Path(place).is_symlink():
            links[place] = str(Path(place).readlink())
            names.extend(reversed(Path(links[place]).parts))
            place = before
    return place


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _inside(folders: Sequence[str], path: str) -> bool:
    return any(_holds(folder, path) for folder in folders)


def _mount_point(shown: Sequence[str]) -> str:
    """Return a folder without anything of `shown`, so that the sandbox does not hide it."""
    for place in _MOUNT_POINTS:
        free = not any(_holds(place, path) for path in shown)
        if free and Path(place).is_dir() and not Path(place).is_symlink():
            return place
    raise SandboxError(
        f"the sandbox cannot be built: each of {', '.join(_MOUNT_POINTS)} is missing, a link, or "
        "contains something that the program may read"
    )


@dataclass(slots=True)
class _Watch:
    child: subprocess.Popen[bytes]
    limits: Limits
    answers: IO[bytes]
    stdin: bytes
    met: Ending | None = None
    parts: dict[int, list[bytes]] = field(default_factory=dict)
    size: int = 0
    own: OwnTime = field(default_factory=OwnTime)

    def to_the_end(self) -> Outcome:
        """Feed, read and watch until every process has ended."""
        self._pump(time.monotonic() + self.limits.wall_seconds)
        answer = self._answer()
        if "refused" in answer:
            raise SandboxError(answer["refused"])
        code = int(answer.get("exit_code", _SIGNALS + signal.SIGKILL))
        code = code if code >= 0 else _SIGNALS - code
        output, errors = (b"".join(self.parts.get(stream, [])) for stream in (1, 2))
        return Outcome(self.met or _ending(code), code, output, errors, self.own.seconds)

    def kill(self) -> None:
        """Kill the whole namespace by its first process."""
        if self.child.poll() is not None:
            return
        below = descendants(self.child.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(below[0] if below else self.child.pid, signal.SIGKILL)
        try:
            self.child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()

    def _pump(self, deadline: float) -> None:
        """Transfer data until the output ends or a limit is met; then nothing of it is left."""
        looked = 0.0
        with selectors.DefaultSelector() as selector:
            self._register(selector)
            while self.met is None and any(key.data for key in selector.get_map().values()):
                for key, _ in selector.select(_LOOK_SECONDS):
                    if self._read(key.fd, key.data) if key.data else self._feed(key.fd):
                        selector.unregister(key.fileobj)
                        if key.data == 0:
                            cast("IO[bytes]", key.fileobj).close()
                now = time.monotonic()
                if now > deadline:
                    self.met = "wall_seconds"
                elif now - looked >= _LOOK_SECONDS:
                    looked = now
                    self._look(now)
        self.kill()

    def _look(self, now: float) -> None:
        below = descendants(self.child.pid)
        self.own.note(now, times_of(below[1:]))
        if held(below, self.limits.open_files) > self.limits.memory_bytes:
            self.met = "memory_bytes"

    def _register(self, selector: selectors.BaseSelector) -> None:
        streams = (self.child.stdin, self.child.stdout, self.child.stderr)
        for number, stream in enumerate(cast("tuple[IO[bytes], ...]", streams)):
            os.set_blocking(stream.fileno(), False)
            event = selectors.EVENT_READ if number else selectors.EVENT_WRITE
            selector.register(stream, event, number)

    def _feed(self, descriptor: int) -> bool:
        """Write what fits; return True if all is written or nothing reads it."""
        try:
            self.stdin = self.stdin[os.write(descriptor, self.stdin[:_CHUNK]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            return True
        return not self.stdin

    def _read(self, descriptor: int, number: int) -> bool:
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        left = self.limits.output_bytes - self.size
        self.parts.setdefault(number, []).append(chunk[:left])
        self.size += len(chunk)
        if self.size > self.limits.output_bytes:
            self.met = "output_bytes"
        return not chunk

    def _answer(self) -> dict[str, Any]:
        lines = [json.loads(line) for line in self.answers.read().splitlines()]
        return next((line for line in lines if "refused" in line), lines[-1] if lines else {})


def _ending(code: int) -> Ending:
    if code == _SIGNALS + signal.SIGXCPU:
        return "cpu_seconds"
    return "signal" if code > _SIGNALS else "exit"
