"""Parts about the machine: the driver, and compilers of kernels."""

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError
from asyncrl.gpu_check.parts import Context, PartFailed, Said
from asyncrl.launch.gpus import NONE_VISIBLE, find_gpus

_DOCTOR_NEEDS = ("pydantic", "msgspec", "zmq", "yaml", "prometheus_client")
_QUERY = "index,name,driver_version,memory.total,memory.used,clocks.max.sm,compute_mode"


def count_gpus(_context: Context) -> Said:
    """Count the GPUs that torch sees."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"torch sees {gpus}", {"gpus": gpus}


def driver(context: Context) -> Said:
    """List findings of `asyncrl doctor`, and add two numbers on each GPU. Raises PartFailed."""
    findings = _doctor()  # first: its kernel wants a GPU that this process does not hold
    import torch

    numbers: dict[str, Any] = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "nvidia_smi": _nvidia_smi(),
        "gpus": [], "doctor": findings,
    }  # fmt: skip
    if not context.gpus and (unseen := _unseen()):
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
        said = f"torch {torch.__version__}, built for {built}, sees no GPU; {unseen}"
        raise PartFailed(said, numbers)
    for index in range(context.gpus):
        found = torch.cuda.get_device_properties(index)
        one = torch.full((1024,), 1.0, device=f"cuda:{index}")
        if (one + one).sum().item() != 2048.0:
            raise PartFailed(f"GPU {index} ({found.name}) computes a wrong sum", numbers)
        numbers["gpus"].append({
            "name": found.name, "capability": f"{found.major}.{found.minor}",
            "gib": round(found.total_memory / 2**30, 1),
            "multiprocessors": found.multi_processor_count,
        })  # fmt: skip
    lacks = [line for line in findings if line.startswith(("lacks", "refused"))]
    named = ", ".join(f"{one['name']} ({one['gib']} GiB)" for one in numbers["gpus"])
    what = f"torch {torch.__version__}, {named or 'no GPU'}"
    if context.gpus and any(line.startswith("refused") for line in lacks):
        raise PartFailed(f"{what}; a run with the defaults is {lacks[-1]}", numbers)
    said = f"doctor reports {' | '.join(lacks)}" if lacks else "doctor reports nothing"
    return f"{what}; {said if findings else 'doctor needs packages that are missing'}", numbers


def _unseen() -> str:
    """Return evidence of a GPU that torch does not see; "" without any, or if it is hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in NONE_VISIBLE:
        return ""
    try:
        there = find_gpus()
    except UserError as error:
        return str(error)
    chosen = "" if visible is None else f", and CUDA_VISIBLE_DEVICES={visible}"
    return f"there are {len(there)}: {', '.join(map(str, there))}{chosen}" if there else ""


def _nvidia_smi() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout or done.stderr).splitlines()


def _doctor() -> list[str]:
    """Return the lines of `asyncrl doctor` for a default run; none without its packages."""
    if any(importlib.util.find_spec(name) is None for name in _DOCTOR_NEEDS):
        return []
    from asyncrl.config.run_config import load_config
    from asyncrl.startup.doctor import diagnose

    lines: list[str] = []
    try:
        diagnose(load_config(None, []), lines.append)
    except UserError as error:
        lines.append(f"refused: {error}")
    return [line for line in lines if line]


def compiler(context: Context) -> Said:
    """Compile a one-line kernel and run it; without a GPU, interpret it."""
    if not context.gpus:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import torch
    import triton

    from asyncrl.gpu_check.one_kernel import add_one

    header = Path(sysconfig.get_path("include")) / "Python.h"
    named = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    c_compiler = next(filter(None, map(shutil.which, named)), None)
    numbers = {
        "triton": triton.__version__, "c_compiler": c_compiler, "interpreted": not context.gpus,
        "python_header": str(header) if header.exists() else None,
    }  # fmt: skip
    found = torch.zeros(64, device=context.device)
    try:
        add_one[(1,)](found, 64)
    except Exception as error:
        needs = {"a C compiler (gcc)": c_compiler, str(header): header.exists()}
        missing = [name for name, there in needs.items() if not there]
        why = f"; missing: {' and '.join(missing)}" if missing else ""
        raise PartFailed(f"Triton {triton.__version__}: {error}{why}", numbers) from error
    if not bool((found == 1).all()):
        raise PartFailed(f"a kernel of one line wrote {found.tolist()}, not 1", numbers)
    how = "compiled and run" if context.gpus else "interpreted (without a GPU to compile for)"
    lacks = "" if c_compiler and header.exists() else "; no C compiler or Python.h: vLLM needs both"
    return f"Triton {triton.__version__}: a kernel was {how}{lacks}", numbers
