"""Finds this machine's GPUs without torch: the controller never holds a GPU.

`nvidia-smi` lists all of them, including MIG parts. Without it, as in some containers,
/proc/driver/nvidia does, without parts and memory. Without both, everything runs on the CPU.
"""

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.errors import UserError

PROC = Path("/proc/driver/nvidia/gpus")
PROC_VERSION = Path("/proc/driver/nvidia/version")
NONE_VISIBLE = ("", "-1", "NoDevFiles", "none", "void")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU."""
_SECONDS = 30.0
"""Longest wait for nvidia-smi: without its persistence daemon it initialises every GPU first."""
_WHOLE = re.compile(r"^GPU (\d+): (.+?) \(UUID: (GPU-[^)]+)\)")
_VERSION = re.compile(r"^(\d+)\.(\d+)$")
_DRIVER = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")
_PART = re.compile(r"^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG part of one."""

    name: str
    """CUDA_VISIBLE_DEVICES for it alone: "3", "GPU-..." or "MIG-..."."""
    uuid: str
    """Begins with GPU- or MIG-."""
    model: str = "GPU"
    memory_mib: int | None = None
    number: int | None = None
    """Number in nvidia-smi's order; None for a part."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, e.g. (9, 0); None if unknown."""
    of: str = ""
    """UUID of the GPU that a part belongs to; empty for a whole one."""

    @property
    def is_part(self) -> bool:
        """True for a part of a GPU. A process can use only one of them."""
        return self.uuid.startswith("MIG-")

    def __str__(self) -> str:
        memory = "" if self.memory_mib is None else f", {self.memory_mib / 1024:.0f} GiB"
        return f"{self.name} ({self.model}{memory})"


def find_gpus() -> list[Gpu]:
    """Return this machine's GPUs, divided ones by their parts. Raises UserError."""
    if shutil.which("nvidia-smi") is None:
        return _from_proc()
    found = parse_list(_ask("-L"))
    query, form = "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"
    try:
        told = _ask(f"{query},compute_cap", form)
    except UserError:  # an older nvidia-smi refuses a query with a field that it does not know
        told = _ask(query, form)
    memory, capability = parse_query(told)
    return [
        replace(gpu, memory_mib=memory.get(gpu.uuid), capability=capability.get(gpu.of or gpu.uuid))
        for gpu in found
    ]


def parse_query(text: str) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Return MiB and compute capability by UUID, from lines `UUID, MiB, 9.0`."""
    memory: dict[str, int] = {}
    capability: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        uuid, mib, version = (one.strip() for one in f"{line},,".split(",")[:3])
        if mib.isdecimal():
            memory[uuid] = int(mib)
        if (found := _VERSION.match(version)) is not None:
            capability[uuid] = int(found[1]), int(found[2])
    return memory, capability


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, e.g. "580.65.06"; None if unknown."""
    try:
        if shutil.which("nvidia-smi") is None:
            return parse_driver(PROC_VERSION.read_text(encoding="utf-8", errors="replace"))
        return parse_driver(_ask("--query-gpu=driver_version", "--format=csv,noheader"))
    except (OSError, UserError):
        return None


def parse_driver(text: str) -> str | None:
    """Return the first version in the driver output of nvidia-smi or /proc."""
    found = _DRIVER.search(text)
    return None if found is None else found[0]


def parse_list(text: str) -> list[Gpu]:
    """Return the GPUs in the output of `nvidia-smi -L`."""
    found: list[Gpu] = []
    for line in text.splitlines():
        if whole := _WHOLE.match(line):
            number, model, uuid = whole.groups()
            found.append(Gpu(number, uuid, model, number=int(number)))
            model_above, uuid_above = model, uuid
        elif (part := _PART.match(line)) and found:
            if not found[-1].is_part:
                found.pop()  # CUDA cannot use a divided GPU as a whole
            profile, uuid = part.groups()
            found.append(Gpu(uuid, uuid, f"{profile} of {model_above}", of=uuid_above))
    return found


def _ask(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", None) or getattr(error, "stderr", None) or error
        raise UserError(
            f"nvidia-smi does not list this machine's GPUs: {str(said).strip()}. Repair the "
            "driver, or set launcher.gpus: [] to run on the CPU"
        ) from error
    return done.stdout


def _from_proc() -> list[Gpu]:
    found: list[Gpu] = []
    for path in sorted(PROC.glob("*/information")):  # folders are named by PCI address, as CUDA's
        text = path.read_text(encoding="utf-8", errors="replace")
        model = re.search(r"^Model:\s*(.*\S)", text, re.MULTILINE)
        if (uuid := re.search(r"^GPU UUID:\s*(GPU-.*\S)", text, re.MULTILINE)) is not None:
            number, name = len(found), "GPU" if model is None else model[1]
            found.append(Gpu(str(number), uuid[1], name, number=number))
    return found


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch, inspected without importing it."""

    version: str
    cuda: str | None
    """Version of CUDA that it is built for; None: it is built for the CPU."""


def torch_build() -> TorchBuild:
    """Read torch/version.py. A torch without one counts as built for CUDA."""
    spec = importlib.util.find_spec("torch")
    origin = None if spec is None else spec.origin
    path = Path("missing") if origin is None else Path(origin).with_name("version.py")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    version = re.search(r"^__version__ = '([^']*)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?::[^=]*)? = (?:'([^']*)'|None)", text, re.MULTILINE)
    return TorchBuild(
        "(unknown)" if version is None else version[1], "unknown" if cuda is None else cuda[1]
    )
