"""Builds the filter of system calls as a program for the kernel (seccomp(2), bpf(4)).

Everything is allowed except what a task's program does not need and what has made holes before:
other processes' memory, mounts and namespaces, keys, modules, BPF programs, io_uring, sockets, and
memory outside all limits. The only sockets left are AF_UNIX streams made as a pair. This goes
further than the network namespace: AF_VSOCK, which reaches the host of a virtual machine, is not in
any namespace, and connections that are not accepted keep the data sent.

Memory outside all limits: System V objects, memfd, shared mappings without a file, pages given to a
pipe (vmsplice), events of inotify, larger buffers of pipes and sockets, descriptors that are sent
away (`asyncrl.sandbox.run` counts the open ones).

Refused calls fail with EPERM, and sockets with EAFNOSUPPORT. clone3 fails with ENOSYS, because its
flags lie in memory where a filter cannot look; C libraries then use clone, whose flags are checked.
A call of another architecture ends the program.
"""

import errno
import struct

AF_UNIX = 1
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS = 0x20, 0x15, 0x35, 0x45
_AND, _RETURN = 0x54, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, -CGROUP, -UTS, -IPC, -USER, -PID and -NET; clone(2) cannot make others."""
_X32 = 0x40000000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's AUDIT_ARCH by machine (`os.uname`)."""

_SAME = """
    pidfd_send_signal 424  io_uring_setup 425  io_uring_enter 426  io_uring_register 427
    open_tree 428  move_mount 429  fsopen 430  fsconfig 431  fsmount 432  fspick 433
    pidfd_open 434  pidfd_getfd 438  process_madvise 440  mount_setattr 442  quotactl_fd 443
    memfd_secret 447  process_mrelease 448
"""
"""Names and numbers; calls added since 2019 have one number on every architecture."""
_OWN = {
    "x86_64": """
    shmget 29  shmat 30  shmctl 31  sendmsg 46  setsockopt 54  semget 64  msgget 68
    ptrace 101  syslog 103  uselib 134
    personality 135  vhangup 153  modify_ldt 154  pivot_root 155  adjtimex 159  chroot 161
    acct 163  settimeofday 164  mount 165  umount2 166  swapon 167  swapoff 168  reboot 169
    sethostname 170  setdomainname 171  iopl 172  ioperm 173  init_module 175
    delete_module 176  quotactl 179  clock_settime 227  mbind 237  set_mempolicy 238
    mq_open 240  kexec_load 246  add_key 248  request_key 249  keyctl 250  inotify_init 253
    migrate_pages 256  unshare 272  vmsplice 278  move_pages 279  inotify_init1 294
    perf_event_open 298  fanotify_init 300
    name_to_handle_at 303  open_by_handle_at 304  clock_adjtime 305  sendmmsg 307  setns 308
    process_vm_readv 310  process_vm_writev 311  kcmp 312  finit_module 313
    memfd_create 319  kexec_file_load 320  bpf 321  userfaultfd 323
    """,
    "aarch64": """
    inotify_init1 26  umount2 39  mount 40  pivot_root 41  chroot 51  vhangup 58  quotactl 60
    vmsplice 75  acct 89  personality 92  unshare 97  kexec_load 104  init_module 105
    delete_module 106  clock_settime 112  syslog 116  ptrace 117  reboot 142  sethostname 161
    setdomainname 162  settimeofday 170  adjtimex 171  mq_open 180  msgget 186  semget 190
    shmget 194  shmctl 195  shmat 196  setsockopt 208  sendmsg 211
    add_key 217  request_key 218  keyctl 219  swapon 224
    swapoff 225  mbind 235  set_mempolicy 237  migrate_pages 238  move_pages 239
    perf_event_open 241  fanotify_init 262  name_to_handle_at 264  open_by_handle_at 265
    clock_adjtime 266  setns 268  sendmmsg 269  process_vm_readv 270
    process_vm_writev 271  kcmp 272
    finit_module 273  memfd_create 279  bpf 280  userfaultfd 282  kexec_file_load 294
    """,
}


def _numbers(table: str) -> dict[str, int]:
    words = table.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


REFUSED = {machine: _numbers(_SAME + own) for machine, own in _OWN.items()}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_MMAP = {"x86_64": 9, "aarch64": 222}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_CLONE3 = 435
_SHARED_ANONYMOUS = 0x21
"""MAP_SHARED (or MAP_SHARED_VALIDATE) | MAP_ANONYMOUS."""
_SET_PIPE_SIZE = 1031
_TYPE, _STREAM = 0xF, 1
"""Bits of socketpair's second argument for the type, and the type SOCK_STREAM."""

_Line = tuple[int, int, int, int]


def _fail(error: int) -> _Line:
    return (_RETURN, 0, 0, _ERRNO | error)


def _argument(place: int) -> _Line:
    return (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * place)


def _of(number: int, *lines: _Line) -> list[_Line]:
    """Return the lines for one system call, which is allowed unless they end it."""
    return [(_JUMP_EQUAL, 0, len(lines) + 1, number), *lines, (_RETURN, 0, 0, _ALLOW)]


def program(machine: str) -> bytes:
    """Return the filter for `machine` as an array of `struct sock_filter`. Raises KeyError."""
    lines: list[_Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_JUMP_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for number in sorted(REFUSED[machine].values()):
        lines += [(_JUMP_EQUAL, 0, 1, number), _fail(errno.EPERM)]
    lines += [
        *_of(_CLONE3, _fail(errno.ENOSYS)),
        *_of(_SOCKET[machine], _fail(errno.EAFNOSUPPORT)),
        *_of(
            _CLONE[machine],
            *(_argument(0), (_JUMP_BITS, 0, 1, _NEW_NAMESPACES), _fail(errno.EPERM)),
        ),
        *_of(
            _SOCKETPAIR[machine],
            *(_argument(0), (_JUMP_EQUAL, 1, 0, AF_UNIX), _fail(errno.EAFNOSUPPORT)),
            *(_argument(1), (_AND, 0, 0, _TYPE), (_JUMP_EQUAL, 1, 0, _STREAM)),
            _fail(errno.EAFNOSUPPORT),
        ),
        *_of(
            _MMAP[machine],
            *(_argument(3), (_AND, 0, 0, _SHARED_ANONYMOUS)),
            *((_JUMP_EQUAL, 0, 1, _SHARED_ANONYMOUS), _fail(errno.EPERM)),
        ),
        *_of(
            _FCNTL[machine],
            *(_argument(1), (_JUMP_EQUAL, 0, 1, _SET_PIPE_SIZE), _fail(errno.EPERM)),
        ),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
